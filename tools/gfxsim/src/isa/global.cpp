// Global, flat and scratch memory (before gfx940: scratch through a buffer descriptor): loads, stores, atomics, and
// loads that go straight to LDS.
#include <algorithm>
#include <atomic>
#include <string>

#include "memory_access.h"
#include "opcode_table.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

enum class Space { global, flat, scratch, buffer };

template <class F>
void for_each_lane(u64 lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

struct Addresses {
  u64 lane[kMaxLanes];
};

// Operands: a 64-bit vector address, or a scalar base with a 32-bit vector offset; scratch: either or both 32-bit
// parts.
template <Space kSpace>
Addresses addresses(Wave& wave, const Op& op, int vector, int scalar) {
  Addresses out;
  u64 defined = ~u64(0), base = u64(std::int64_t(op.offset0));
  const Operand& offset = op.operand[vector];
  const bool has_scalar = kSpace != Space::flat && op.operand[scalar].kind == Kind::scalar;
  if (has_scalar) {
    base += read_scalar(wave, op.operand[scalar]);
    if (!scalar_defined(wave, op.operand[scalar])) defined = 0;
  }
  if (offset.kind == Kind::none) {
    std::fill_n(out.lane, kMaxLanes, base);
  } else if (has_scalar || kSpace == Space::scratch) {
    const auto part = load<u32>(wave, op, vector);
    defined &= value_defined<u32>(wave, op, vector);
    for (int i = 0; i < kMaxLanes; ++i) out.lane[i] = base + part[i];
  } else {
    const auto whole = load<u64>(wave, op, vector);
    defined &= wave.v_defined[offset.reg].both() & wave.v_defined[offset.reg + 1].both();
    for (int i = 0; i < kMaxLanes; ++i) out.lane[i] = base + whole[i];
  }
  require_defined_address(wave, op, wave.exec(), defined);
  return out;
}

// Operands: a 32-bit vector offset or none, the descriptor, a scalar offset. The descriptor's lanes are interleaved, so
// that an offset is one of private memory.
template <>
Addresses addresses<Space::buffer>(Wave& wave, const Op& op, int vector, int) {
  const auto refuse = [&](const char* why) { throw Error(op.text + " at " + std::to_string(op.pc) + ": " + why); };
  const Operand& offset = op.operand[vector];
  if (wave.read64(op.operand[2].reg) != kPrivateAperture) refuse("buffers other than scratch are not modelled");
  if (read_scalar(wave, op.operand[3]) != 0) refuse("scalar offsets are not modelled");
  if ((offset.kind != Kind::none) != op.offset_enable) refuse("indices are not modelled");
  Addresses out;
  std::fill_n(out.lane, kMaxLanes, u64(std::int64_t(op.offset0)));
  if (offset.kind == Kind::none) return out;
  const auto part = load<u32>(wave, op, vector);
  for (int i = 0; i < kMaxLanes; ++i) out.lane[i] += part[i];
  require_defined_address(wave, op, wave.exec(), value_defined<u32>(wave, op, vector));
  return out;
}

template <Space kSpace>
Location locate(Wave& wave, const Op& op, int lane, u64 address, u32 bytes, bool is_write) {
  if constexpr (kSpace == Space::scratch || kSpace == Space::buffer)
    return locate_scratch(wave, op, lane, u32(address), bytes);
  if constexpr (kSpace == Space::flat) {
    if (address >> 32 == kPrivateAperture >> 32) return locate_scratch(wave, op, lane, u32(address), bytes);
    if (address >> 32 == kSharedAperture >> 32)
      throw Error(op.text + " at " + std::to_string(op.pc) + ": flat accesses to LDS are not modelled");
  }
  return locate_global(wave, op, lane, address, bytes, is_write);
}

// Whether a flat access may reach LDS for all that its compiler knew: it would have written another instruction for
// global memory. For private memory LLVM writes this one too, but knows that it counts like any load
// (mayAccessLDSThroughFlat).
bool may_reach_lds(const Wave& wave, const Addresses& at) {
  bool may = false;
  for_each_lane(wave.exec(), [&](int lane) { may |= at.lane[lane] >> 32 != kPrivateAperture >> 32; });
  return may;
}

// Numbers the operation in its stream. Flat accesses count in two counters; those that may reach LDS are "not
// considered done until both have been decremented" (AMD's ISA manuals).
template <Space kSpace>
std::pair<Stream, u32> start(Wave& wave, const Addresses& at, bool is_store) {
  const Stream stream = is_store && wave.target->counts_stores ? kStores : kLoads;
  const u32 number = issue(wave, stream);
  if (kSpace != Space::flat) return {stream, number};
  const u32 in_lds = issue(wave, kLds);
  if (may_reach_lds(wave, at)) wave.last_flat[stream] = number, wave.last_flat[kLds] = in_lds;
  return {stream, number};
}

template <Space kSpace, u32 kBytes, bool kSigned, Into kInto>
void run_load(Wave& wave, const Op& op) {
  constexpr AccessShape shape{kBytes, kSigned, kInto};
  const Addresses at = addresses<kSpace>(wave, op, 1, 2);
  const auto [stream, number] = start<kSpace>(wave, at, false);
  for_each_lane(wave.exec(), [&](int lane) {
    const Location from = locate<kSpace>(wave, op, lane, at.lane[lane], kBytes, false);
    if (from.data) read_lane(wave, op.operand[0].reg, lane, from, shape);
  });
  if (kSpace == Space::global) count_lines(wave, op, at.lane, wave.exec(), kBytes);
  constexpr int words = int(kBytes + 3) / 4;
  mark_pending(wave, op.operand[0], stream, number, words);
  if (wave.last_flat[kLoads] == number) std::fill_n(wave.v_flat + op.operand[0].reg, words, wave.last_flat[kLds]);
}

template <Space kSpace, u32 kBytes, Into kInto>
void run_store(Wave& wave, const Op& op) {
  constexpr AccessShape shape{kBytes, false, kInto};
  constexpr int data = kSpace == Space::buffer ? 0 : 1;
  const Addresses at = addresses<kSpace>(wave, op, 1 - data, 2);
  start<kSpace>(wave, at, true);
  for_each_lane(wave.exec(), [&](int lane) {
    const Location to = locate<kSpace>(wave, op, lane, at.lane[lane], kBytes, true);
    if (to.data) write_lane(wave, op, op.operand[data].reg, lane, to, shape);
  });
  if (kSpace == Space::global) count_lines(wave, op, at.lane, wave.exec(), kBytes);
}

// LDS address: M0, the instruction's offset, and 4 bytes for each lane of the wave.
void run_load_to_lds(Wave& wave, const Op& op) {
  const Addresses at = addresses<Space::global>(wave, op, 0, 1);
  const u32 number = wave.last_load = issue(wave, kLoads);
  if (wave.s_defined[kM0] != ~0u && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", -1, "M0 was never written");
  const u32 base = wave.s[kM0] + u32(op.offset0);
  for_each_lane(wave.exec(), [&](int lane) {
    const Location from = locate_global(wave, op, lane, at.lane[lane], 4, false);
    if (!from.data) return;
    u32 value;
    std::memcpy(&value, from.data, 4);
    note_lds_write(wave, op, lane, base + u32(lane) * 4, value, true, number);
  });
  count_lines(wave, op, at.lane, wave.exec(), 4);
}

template <class F>
void run_atomic(Wave& wave, const Op& op) {
  using T = typename Signature<decltype(+F{})>::Result;
  const bool returns = op.returns_data;
  const int vector = returns ? 1 : 0;
  const Addresses at = addresses<Space::global>(wave, op, vector, vector + 2);
  const auto [stream, number] = start<Space::global>(wave, at, !returns);
  const auto operand = load<T>(wave, op, vector + 1);
  const u64 missing = wave.exec() & ~value_defined<T>(wave, op, vector + 1);
  if (missing && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", std::countr_zero(missing), "the operand of an atomic was never written");
  for_each_lane(wave.exec(), [&](int lane) {
    const Location to = locate_global(wave, op, lane, at.lane[lane], sizeof(T), true, sizeof(T));
    if (!to.data) return;
    std::atomic_ref<Bits<T>> target(*reinterpret_cast<Bits<T>*>(to.data));
    Bits<T> old = target.load();
    while (!target.compare_exchange_weak(old, std::bit_cast<Bits<T>>(F{}(std::bit_cast<T>(old), operand[lane])))) {
    }
    if (returns)
      read_lane(wave, op.operand[0].reg, lane, {reinterpret_cast<std::uint8_t*>(&old), nullptr}, {sizeof(T)});
  });
  count_lines(wave, op, at.lane, wave.exec(), sizeof(T));
  if (returns) mark_pending(wave, op.operand[0], stream, number, int(sizeof(T)) / 4);
}

// Cache control: nothing to do but to count.
void run_cache(Wave& wave, const Op&) { issue(wave, kLoads); }
void run_write_back(Wave& wave, const Op&) { issue(wave, wave.target->counts_stores ? kStores : kLoads); }

template <Space kSpace>
void add_accesses(OpcodeTable& t, const std::string& prefix) {
  const Class kind = kSpace == Space::flat ? Class::flat : Class::vmem;
  const std::uint8_t operands = kSpace == Space::flat ? 2 : kSpace == Space::buffer ? 4 : 3;
  const auto names = [&](const char* older, const char* newer, Opcode opcode) {
    t.add({(prefix + older).c_str(), (prefix + newer).c_str()}, opcode);
  };
  const auto load = [&](const char* older, const char* newer, Handler run, u32 traits = 0) {
    names(older, newer, {"", run, kind, 1, Literal::b32, traits, 0, operands});
  };
  load("_load_dword", "_load_b32", run_load<kSpace, 4, false, Into::whole>);
  load("_load_dwordx2", "_load_b64", run_load<kSpace, 8, false, Into::whole>);
  load("_load_dwordx3", "_load_b96", run_load<kSpace, 12, false, Into::whole>);
  load("_load_dwordx4", "_load_b128", run_load<kSpace, 16, false, Into::whole>);
  load("_load_ushort", "_load_u16", run_load<kSpace, 2, false, Into::whole>);
  load("_load_sshort", "_load_i16", run_load<kSpace, 2, true, Into::whole>);
  load("_load_ubyte", "_load_u8", run_load<kSpace, 1, false, Into::whole>);
  load("_load_sbyte", "_load_i8", run_load<kSpace, 1, true, Into::whole>);
  load("_load_short_d16", "_load_d16_b16", run_load<kSpace, 2, false, Into::low_keep>, kReadsResult);
  load("_load_short_d16_hi", "_load_d16_hi_b16", run_load<kSpace, 2, false, Into::high_keep>, kReadsResult);
  const auto store = [&](const char* older, const char* newer, Handler run) {
    names(older, newer, {"", run, kind, 0, Literal::b32, 0, 0, operands});
  };
  store("_store_dword", "_store_b32", run_store<kSpace, 4, Into::whole>);
  store("_store_dwordx2", "_store_b64", run_store<kSpace, 8, Into::whole>);
  store("_store_dwordx3", "_store_b96", run_store<kSpace, 12, Into::whole>);
  store("_store_dwordx4", "_store_b128", run_store<kSpace, 16, Into::whole>);
  store("_store_short", "_store_b16", run_store<kSpace, 2, Into::whole>);
  store("_store_byte", "_store_b8", run_store<kSpace, 1, Into::whole>);
  store("_store_short_d16_hi", "_store_d16_hi_b16", run_store<kSpace, 2, Into::high_keep>);
}

}  // namespace

void add_global(OpcodeTable& t) {
  add_accesses<Space::global>(t, "global");
  add_accesses<Space::flat>(t, "flat");
  add_accesses<Space::scratch>(t, "scratch");
  add_accesses<Space::buffer>(t, "buffer");
  t.add({"global_load_lds_dword"}, {"", run_load_to_lds, Class::vmem, 0, Literal::b32, kReadsM0, 0, 2});
  const auto atomic = [&]<class F>(Names names, F) {
    t.add(names, {"", run_atomic<F>, Class::vmem, 1, Literal::b32, kReturnsByModifier});
  };
  atomic({"global_atomic_add", "global_atomic_add_u32"}, [](u32 a, u32 b) { return a + b; });
  atomic({"global_atomic_add_x2", "global_atomic_add_u64"}, [](u64 a, u64 b) { return a + b; });
  atomic({"global_atomic_umax", "global_atomic_max_u32"}, [](u32 a, u32 b) { return std::max(a, b); });
  atomic({"global_atomic_or", "global_atomic_or_b32"}, [](u32 a, u32 b) { return a | b; });
  atomic({"global_atomic_swap", "global_atomic_swap_b32"}, [](u32, u32 b) { return b; });
  atomic({"global_atomic_add_f32"}, [](float a, float b) { return a + b; });
  for (const char* name : {"buffer_inv", "buffer_gl0_inv", "buffer_gl1_inv", "global_inv"})
    t.add({name}, {"", run_cache, Class::vmem, 0, Literal::b32, kNoOperands});
  for (const char* name : {"buffer_wbl2", "global_wb", "global_wbinv"})
    t.add({name}, {"", run_write_back, Class::vmem, 0, Literal::b32, kNoOperands});
}

}  // namespace gfxsim
