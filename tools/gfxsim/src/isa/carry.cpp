// Integer instructions with a lane mask as carry in or carry out, and selection by a lane mask.
#include "opcode_table.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

struct Sum {
  u32 value;
  bool carry;
};

// result, carry out = F{}(a, b, carry in); operands: result, carry out, a, b [, carry in].
template <class F, bool kCarryIn>
void run_carry(Wave& wave, const Op& op) {
  const auto a = load<u32>(wave, op, 2), b = load<u32>(wave, op, 3);
  u64 defined = value_defined<u32>(wave, op, 2) & value_defined<u32>(wave, op, 3), carry_in = 0;
  if constexpr (kCarryIn) {
    carry_in = wave.read_mask(op.operand[4].reg);
    defined &= wave.defined_mask(op.operand[4].reg);
  }
  Lanes<u32> out;
  u64 carry = 0;
  for (int i = 0; i < kMaxLanes; ++i) {
    const Sum sum = F{}(a[i], b[i], u32(carry_in >> i & 1));
    out[i] = sum.value;
    carry |= u64(sum.carry) << i;
  }
  const u64 exec = wave.exec();
  store(wave, op, 0, out, {defined, defined});
  write_mask(wave, op, op.operand[1], carry & exec, defined | ~exec);
}

template <bool kCarryIn, class F>
void add_carrying(OpcodeTable& t, Names names, F) {
  t.add(names, {"", run_carry<F, kCarryIn>, Class::valu, 2, Literal::b32, 0, 0, kCarryIn ? 5 : 4});
}

// 64-bit multiply-add of 32-bit factors; the carry out is the 65th bit (signed: overflow).
template <bool kSigned>
void run_mad64(Wave& wave, const Op& op) {
  const auto a = load<u32>(wave, op, 2), b = load<u32>(wave, op, 3);
  const auto c = load<u64>(wave, op, 4);
  const u64 defined =
      value_defined<u32>(wave, op, 2) & value_defined<u32>(wave, op, 3) & value_defined<u64>(wave, op, 4);
  Lanes<u64> out;
  u64 carry = 0;
  for (int i = 0; i < kMaxLanes; ++i) {
    const u64 product = kSigned ? u64(i64(std::int32_t(a[i])) * std::int32_t(b[i])) : u64(a[i]) * b[i];
    out[i] = product + c[i];
    const bool overflow = kSigned ? ((product ^ out[i]) & (c[i] ^ out[i])) >> 63 : out[i] < product;
    carry |= u64(overflow) << i;
  }
  const u64 exec = wave.exec();
  const u64 low =
      value_defined<u32>(wave, op, 2) & value_defined<u32>(wave, op, 3) & low_word_defined(wave, op.operand[4]);
  store(wave, op, 0, out, {defined, defined});
  store_defined(wave, op.operand[0].reg, {low, low}, exec);
  write_mask(wave, op, op.operand[1], carry & exec, defined | ~exec);
}

// Only the chosen source must be defined.
template <class T>
void run_cndmask(Wave& wave, const Op& op) {
  const auto a = load<T>(wave, op, 1), b = load<T>(wave, op, 2);
  const u64 mask = wave.read_mask(op.operand[3].reg), known = wave.defined_mask(op.operand[3].reg);
  Lanes<T> out;
  for (int i = 0; i < kMaxLanes; ++i) out[i] = mask >> i & 1 ? b[i] : a[i];
  const Halves x = load_defined(wave, op, 1), y = load_defined(wave, op, 2);
  store(wave, op, 0, out, {known & ((x.lo & ~mask) | (y.lo & mask)), known & ((x.hi & ~mask) | (y.hi & mask))});
}

}  // namespace

void add_carry(OpcodeTable& t) {
  add_carrying<false>(t, {"v_add_co_u32"}, [](u32 a, u32 b, u32) { return Sum{a + b, a + b < a}; });
  add_carrying<false>(t, {"v_sub_co_u32"}, [](u32 a, u32 b, u32) { return Sum{a - b, b > a}; });
  add_carrying<false>(t, {"v_subrev_co_u32"}, [](u32 a, u32 b, u32) { return Sum{b - a, a > b}; });
  add_carrying<true>(t, {"v_addc_co_u32", "v_add_co_ci_u32"},
                     [](u32 a, u32 b, u32 c) { return Sum{a + b + c, (u64(a) + b + c) >> 32 != 0}; });
  add_carrying<true>(t, {"v_subb_co_u32", "v_sub_co_ci_u32"},
                     [](u32 a, u32 b, u32 c) { return Sum{a - b - c, u64(b) + c > a}; });
  add_carrying<true>(t, {"v_subbrev_co_u32", "v_subrev_co_ci_u32"},
                     [](u32 a, u32 b, u32 c) { return Sum{b - a - c, u64(a) + c > b}; });
  t.add({"v_mad_u64_u32", "v_mad_co_u64_u32"},
        {"", run_mad64<false>, Class::valu, 2, Literal::b64, kShortFactors, 0, 5});
  t.add({"v_mad_i64_i32", "v_mad_co_i64_i32"},
        {"", run_mad64<true>, Class::valu, 2, Literal::b64, kShortFactors, 0, 5});
  t.add({"v_cndmask_b16"}, {"", run_cndmask<std::uint16_t>, Class::valu, 1, Literal::f16, 0, 0, 4});
  t.add({"v_cndmask_b32"}, {"", run_cndmask<u32>, Class::valu, 1, Literal::b32, kAcceptsDpp, 0, 4});
}

}  // namespace gfxsim
