// Permutations of lanes through the LDS unit: they count as LDS operations but touch no memory.
#include "opcode_table.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

struct Permuted {
  Lanes<u32> value{};
  Halves defined{~u64(0), ~u64(0)};
};

void take(Permuted& out, int to, const Lanes<u32>& value, Halves known, int from) {
  out.value[to] = value[from];
  const u64 bit = u64(1) << to;
  if (!(known.lo >> from & 1)) out.defined.lo &= ~bit;
  if (!(known.hi >> from & 1)) out.defined.hi &= ~bit;
}

void finish(Wave& wave, const Op& op, const Permuted& out) {
  store_bits(wave, op.operand[0].reg, out.value.lane, wave.exec());
  store_defined(wave, op.operand[0].reg, out.defined, wave.exec());
  mark_pending(wave, op.operand[0], kLds, issue(wave, kLds), 1);
}

// Lane i reads lane (address[i] / 4); inactive lanes read as 0.
void run_bpermute(Wave& wave, const Op& op) {
  const auto address = load<u32>(wave, op, 1), value = load<u32>(wave, op, 2);
  const u64 address_known = value_defined<u32>(wave, op, 1), exec = wave.exec();
  const Halves known = load_defined(wave, op, 2);
  Permuted out;
  for (int i = 0; i < wave.lanes; ++i) {
    const int from = int((address[i] + u32(op.offset0)) / 4) & (wave.lanes - 1);
    if (exec >> from & 1) take(out, i, value, known, from);
  }
  out.defined.lo &= address_known;
  out.defined.hi &= address_known;
  finish(wave, op, out);
}

// Lane i sends to lane (address[i] / 4); the last lane wins, lanes nobody sends to become 0.
void run_permute(Wave& wave, const Op& op) {
  const auto address = load<u32>(wave, op, 1), value = load<u32>(wave, op, 2);
  const u64 address_known = value_defined<u32>(wave, op, 1), exec = wave.exec();
  const Halves known = load_defined(wave, op, 2);
  Permuted out;
  for (int i = 0; i < wave.lanes; ++i) {
    if (!(exec >> i & 1)) continue;
    take(out, int((address[i] + u32(op.offset0)) / 4) & (wave.lanes - 1), value, known, i);
  }
  if (exec & ~address_known) out.defined = {};
  finish(wave, op, out);
}

// Bit 15 of the pattern: four lanes of a quad by two bits each; else lane = ((lane & and) | or) ^ xor within 32 lanes.
void run_swizzle(Wave& wave, const Op& op) {
  const auto value = load<u32>(wave, op, 1);
  const Halves known = load_defined(wave, op, 1);
  const u32 pattern = u32(op.offset0);
  const u64 exec = wave.exec();
  Permuted out;
  for (int i = 0; i < wave.lanes; ++i) {
    const int within = i & 31;
    const int from =
        pattern & 0x8000
            ? (i & ~3) | int(pattern >> (2 * (i & 3)) & 3)
            : (i & ~31) | (((within & int(pattern & 31)) | int(pattern >> 5 & 31)) ^ int(pattern >> 10 & 31));
    if (exec >> from & 1) take(out, i, value, known, from);
  }
  finish(wave, op, out);
}

}  // namespace

void add_lds_permutes(OpcodeTable& t);
void add_lds_permutes(OpcodeTable& t) {
  t.add({"ds_bpermute_b32"}, {"", run_bpermute, Class::cross_lane, 1, Literal::b32, 0, 0, 3});
  t.add({"ds_permute_b32"}, {"", run_permute, Class::cross_lane, 1, Literal::b32, 0, 0, 3});
  t.add({"ds_swizzle_b32"}, {"", run_swizzle, Class::cross_lane, 1, Literal::b32, 0, 0, 2});
}

}  // namespace gfxsim
