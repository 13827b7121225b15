// Scalar integer instructions (SOP1, SOP2, SOPC, SOPK).
#include <algorithm>
#include <bit>
#include <string>

#include "opcode_table.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

// A result with the new SCC; plain results leave SCC alone.
template <class T>
struct WithScc {
  T value;
  bool scc;
};
template <class T>
WithScc<T> nonzero(T value) {
  return {value, value != 0};
}

constexpr u64 kAllBits = ~u64(0);

bool sources_defined(const Wave& wave, const Op& op, int first, int count) {
  for (int i = first; i < first + count; ++i)
    if (!scalar_defined(wave, op.operand[i])) return false;
  return true;
}

template <class T>
T source(const Wave& wave, const Op& op, std::size_t i) {
  return from_bits<T>(read_scalar(wave, op.operand[i]));
}

template <class T>
void finish(Wave& wave, const Op& op, T result, bool defined) {
  write_scalar(wave, op, op.operand[0], to_bits(result), defined ? kAllBits : 0);
}
template <class T>
void finish(Wave& wave, const Op& op, WithScc<T> result, bool defined) {
  wave.scc = result.scc;
  wave.scc_defined = defined;
  finish(wave, op, result.value, defined);
}

template <class F>
void run_scalar(Wave& wave, const Op& op) {
  [&]<class R, class... A>(R (*)(A...)) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      const bool accumulates = op.opcode->traits & kAccumulates;
      const auto index = [&](std::size_t i) { return accumulates ? i : 1 + i; };
      const bool defined = sources_defined(wave, op, int(index(0)), sizeof...(A));
      finish(wave, op, F{}(source<A>(wave, op, index(I))...), defined);
    }(std::index_sequence_for<A...>{});
  }(decltype(+F{})(nullptr));
}

template <class F>
void add(OpcodeTable& t, Names names, F, u32 traits = 0) {
  using S = Signature<decltype(+F{})>;
  const bool accumulates = traits & kAccumulates;
  t.add(names,
        {"", run_scalar<F>, Class::salu, 1, literal_of<F>(), traits, 0, std::uint8_t(S::sources + !accumulates)});
}

// Comparisons write SCC only.
template <class F>
void run_compare(Wave& wave, const Op& op) {
  [&]<class A, class B>(bool (*)(A, B)) {
    wave.scc = F{}(source<A>(wave, op, 0), source<B>(wave, op, 1));
    wave.scc_defined = sources_defined(wave, op, 0, 2);
  }(decltype(+F{})(nullptr));
}
template <class F>
void add_compare(OpcodeTable& t, Names names, F) {
  t.add(names, {"", run_compare<F>, Class::salu, 0, literal_of<F>(), kWritesScc, 0, 2});
}

// Instructions that read SCC as carry or condition.
struct Carry {
  u32 value;
  bool scc;
};
template <class F>
void run_with_carry(Wave& wave, const Op& op) {
  const bool defined = sources_defined(wave, op, 1, 2) && wave.scc_defined;
  const Carry sum = F{}(source<u32>(wave, op, 1), source<u32>(wave, op, 2), u32(wave.scc));
  finish(wave, op, WithScc<u32>{sum.value, sum.scc}, defined);
}

template <class T>
void run_cselect(Wave& wave, const Op& op) {
  const int chosen = wave.scc ? 1 : 2;
  finish(wave, op, source<T>(wave, op, chosen), wave.scc_defined && scalar_defined(wave, op.operand[chosen]));
}
template <class T>
void run_cmov(Wave& wave, const Op& op) {
  if (!wave.scc_defined) return finish(wave, op, T(0), false);
  if (wave.scc) finish(wave, op, source<T>(wave, op, 1), scalar_defined(wave, op.operand[1]));
}

// Bitwise instructions know their result bit by bit: a zero decides an and, a one an or.
enum class Logic { op_and, op_or, op_xor, op_andn2, op_orn2, op_nand, op_nor, op_xnor };
template <Logic kLogic>
WithScc<u64> logic(u64 a, u64 b, u64& a_known, u64& b_known) {
  if (kLogic == Logic::op_andn2 || kLogic == Logic::op_orn2) b = ~b;
  const u64 both = a_known & b_known;
  u64 value = 0, known = both;
  if constexpr (kLogic == Logic::op_and || kLogic == Logic::op_andn2 || kLogic == Logic::op_nand) {
    value = a & b;
    known = both | (a_known & ~a) | (b_known & ~b);
  } else if constexpr (kLogic == Logic::op_or || kLogic == Logic::op_orn2 || kLogic == Logic::op_nor) {
    value = a | b;
    known = both | (a_known & a) | (b_known & b);
  } else {
    value = a ^ b;
  }
  if (kLogic == Logic::op_nand || kLogic == Logic::op_nor || kLogic == Logic::op_xnor) value = ~value;
  a_known = known;
  return {value, false};
}

u64 known_bits(const Wave& wave, const Operand& operand) {
  if (operand.kind != Kind::scalar) return kAllBits;
  return operand.dwords == 2 ? wave.defined64(operand.reg) : wave.s_defined[operand.reg] | kAllBits << 32;
}

template <Logic kLogic, class T>
void run_logic(Wave& wave, const Op& op) {
  u64 known = known_bits(wave, op.operand[1]), b_known = known_bits(wave, op.operand[2]);
  const T value =
      T(logic<kLogic>(read_scalar(wave, op.operand[1]), read_scalar(wave, op.operand[2]), known, b_known).value);
  wave.scc = value != 0;
  wave.scc_defined = T(~known) == 0 || (value & T(known)) != 0;
  write_scalar(wave, op, op.operand[0], value, known);
}

// old EXEC -> result; EXEC = source op EXEC; SCC = EXEC != 0.
template <Logic kLogic, class T>
void run_saveexec(Wave& wave, const Op& op) {
  u64 known = known_bits(wave, op.operand[1]), exec_known = kAllBits;
  const T source_value = T(read_scalar(wave, op.operand[1])), exec = T(wave.exec());
  const T value = T(logic<kLogic>(source_value, exec, known, exec_known).value);
  write_scalar(wave, op, op.operand[0], exec, kAllBits);
  Operand result;
  result.kind = Kind::scalar;
  result.reg = kExec;
  result.dwords = sizeof(T) / 4;
  write_scalar(wave, op, result, value, known);
  wave.scc = value != 0;
  wave.scc_defined = true;
}

template <Logic kLogic>
void add_logic(OpcodeTable& t, const std::string& name, const std::string& newer) {
  const auto both = [&](const char* suffix, Handler run, Literal literal) {
    const std::string first = "s_" + name + suffix, second = "s_" + newer + suffix;
    const Opcode opcode{"", run, Class::salu, 1, literal, kWritesScc, 0, 3};
    if (first == second) return t.add({first.c_str()}, opcode);
    t.add({first.c_str(), second.c_str()}, opcode);
  };
  both("_b32", run_logic<kLogic, u32>, Literal::b32);
  both("_b64", run_logic<kLogic, u64>, Literal::b64);
}

template <Logic kLogic>
void add_saveexec(OpcodeTable& t, Names names32, Names names64) {
  t.add(names32, {"", run_saveexec<kLogic, u32>, Class::salu, 1, Literal::b32, kWritesScc, 0, 2});
  t.add(names64, {"", run_saveexec<kLogic, u64>, Class::salu, 1, Literal::b64, kWritesScc, 0, 2});
}

bool overflows(u32 a, u32 b, u32 sum) { return ((a ^ sum) & (b ^ sum)) >> 31; }
u32 absolute(u32 a) { return i32(a) < 0 ? 0u - a : a; }

template <class T>
T extract(T value, u32 control) {
  const u32 offset = control & (sizeof(T) * 8 - 1), width = control >> 16 & 127;
  const T shifted = T(value >> offset);
  using Unsigned = std::make_unsigned_t<T>;
  if (width == 0) return 0;
  if (width >= sizeof(T) * 8) return shifted;
  const int drop = int(sizeof(T) * 8 - width);
  return T(Unsigned(shifted) << drop) >> drop;
}

void add_arithmetic(OpcodeTable& t) {
  add(t, {"s_add_u32", "s_add_co_u32"}, [](u32 a, u32 b) { return WithScc<u32>{a + b, a + b < a}; }, kWritesScc);
  add(t, {"s_sub_u32", "s_sub_co_u32"}, [](u32 a, u32 b) { return WithScc<u32>{a - b, (b > a)}; }, kWritesScc);
  add(
      t, {"s_add_i32", "s_add_co_i32"}, [](u32 a, u32 b) { return WithScc<u32>{a + b, overflows(a, b, a + b)}; },
      kWritesScc);
  add(
      t, {"s_sub_i32", "s_sub_co_i32"}, [](u32 a, u32 b) { return WithScc<u32>{a - b, overflows(a, ~b, a - b)}; },
      kWritesScc);
  add(
      t, {"s_addk_i32", "s_addk_co_i32"}, [](u32 a, u32 b) { return WithScc<u32>{a + b, overflows(a, b, a + b)}; },
      kWritesScc | kAccumulates);
  add(t, {"s_mulk_i32"}, [](u32 a, u32 b) { return a * b; }, kAccumulates);
  add(t, {"s_mul_i32"}, [](u32 a, u32 b) { return a * b; });
  add(t, {"s_mul_hi_u32"}, [](u32 a, u32 b) { return u32(u64(a) * b >> 32); });
  add(t, {"s_mul_hi_i32"}, [](u32 a, u32 b) { return u32(u64(i64(i32(a)) * i32(b)) >> 32); });
  add(t, {"s_add_nc_u64", "s_add_u64"}, [](u64 a, u64 b) { return a + b; });
  add(t, {"s_sub_nc_u64", "s_sub_u64"}, [](u64 a, u64 b) { return a - b; });
  add(t, {"s_mul_u64"}, [](u64 a, u64 b) { return a * b; });
  add(t, {"s_abs_i32"}, [](u32 a) { return nonzero(absolute(a)); }, kWritesScc);
  add(t, {"s_max_i32"}, [](i32 a, i32 b) { return WithScc<i32>{std::max(a, b), a >= b}; }, kWritesScc);
  add(t, {"s_min_i32"}, [](i32 a, i32 b) { return WithScc<i32>{std::min(a, b), a < b}; }, kWritesScc);
  add(t, {"s_max_u32"}, [](u32 a, u32 b) { return WithScc<u32>{std::max(a, b), a >= b}; }, kWritesScc);
  add(t, {"s_min_u32"}, [](u32 a, u32 b) { return WithScc<u32>{std::min(a, b), a < b}; }, kWritesScc);
  const auto carrying = [&]<class F>(Names names, F) {
    t.add(names, {"", run_with_carry<F>, Class::salu, 1, Literal::b32, kReadsScc | kWritesScc, 0, 3});
  };
  carrying({"s_addc_u32", "s_add_co_ci_u32"},
           [](u32 a, u32 b, u32 c) { return Carry{a + b + c, (u64(a) + b + c) >> 32 != 0}; });
  carrying({"s_subb_u32", "s_sub_co_ci_u32"}, [](u32 a, u32 b, u32 c) { return Carry{a - b - c, (u64(b) + c > a)}; });
  add(
      t, {"s_lshl1_add_u32"}, [](u32 a, u32 b) { return WithScc<u32>{(a << 1) + b, ((u64(a) << 1) + b) >> 32 != 0}; },
      kWritesScc);
  add(
      t, {"s_lshl2_add_u32"}, [](u32 a, u32 b) { return WithScc<u32>{(a << 2) + b, ((u64(a) << 2) + b) >> 32 != 0}; },
      kWritesScc);
  add(
      t, {"s_lshl3_add_u32"}, [](u32 a, u32 b) { return WithScc<u32>{(a << 3) + b, ((u64(a) << 3) + b) >> 32 != 0}; },
      kWritesScc);
  add(
      t, {"s_lshl4_add_u32"}, [](u32 a, u32 b) { return WithScc<u32>{(a << 4) + b, ((u64(a) << 4) + b) >> 32 != 0}; },
      kWritesScc);
}

void add_bit_operations(OpcodeTable& t) {
  add(t, {"s_lshl_b32"}, [](u32 a, u32 b) { return nonzero(a << (b & 31)); }, kWritesScc);
  add(t, {"s_lshr_b32"}, [](u32 a, u32 b) { return nonzero(a >> (b & 31)); }, kWritesScc);
  add(t, {"s_ashr_i32"}, [](i32 a, u32 b) { return nonzero(a >> (b & 31)); }, kWritesScc);
  add(t, {"s_lshl_b64"}, [](u64 a, u32 b) { return nonzero(a << (b & 63)); }, kWritesScc);
  add(t, {"s_lshr_b64"}, [](u64 a, u32 b) { return nonzero(a >> (b & 63)); }, kWritesScc);
  add(t, {"s_ashr_i64"}, [](i64 a, u32 b) { return nonzero(a >> (b & 63)); }, kWritesScc);
  add(t, {"s_bfe_u32"}, [](u32 a, u32 b) { return nonzero(extract<u32>(a, b)); }, kWritesScc);
  add(t, {"s_bfe_i32"}, [](i32 a, u32 b) { return nonzero(extract<i32>(a, b)); }, kWritesScc);
  add(t, {"s_bfe_u64"}, [](u64 a, u32 b) { return nonzero(extract<u64>(a, b)); }, kWritesScc);
  add(t, {"s_bfe_i64"}, [](i64 a, u32 b) { return nonzero(extract<i64>(a, b)); }, kWritesScc);
  add(t, {"s_bfm_b32"}, [](u32 n, u32 at) { return ((1u << (n & 31)) - 1) << (at & 31); });
  add(t, {"s_not_b32"}, [](u32 a) { return nonzero(~a); }, kWritesScc);
  add(t, {"s_not_b64"}, [](u64 a) { return nonzero(~a); }, kWritesScc);
  add(t, {"s_bcnt1_i32_b32"}, [](u32 a) { return nonzero(u32(std::popcount(a))); }, kWritesScc);
  add(t, {"s_bcnt1_i32_b64"}, [](u64 a) { return nonzero(u32(std::popcount(a))); }, kWritesScc);
  add(t, {"s_ff1_i32_b32", "s_ctz_i32_b32"}, [](u32 a) { return a ? u32(std::countr_zero(a)) : ~0u; });
  add(t, {"s_ff1_i32_b64", "s_ctz_i32_b64"}, [](u64 a) { return a ? u32(std::countr_zero(a)) : ~0u; });
  add(t, {"s_flbit_i32_b32", "s_clz_i32_u32"}, [](u32 a) { return a ? u32(std::countl_zero(a)) : ~0u; });
  add(t, {"s_flbit_i32_b64", "s_clz_i32_u64"}, [](u64 a) { return a ? u32(std::countl_zero(a)) : ~0u; });
  add(t, {"s_brev_b32"}, [](u32 a) {
    u32 out = 0;
    for (int i = 0; i < 32; ++i) out |= (a >> i & 1) << (31 - i);
    return out;
  });
  add(t, {"s_sext_i32_i8"}, [](u32 a) { return u32(i32(a << 24) >> 24); });
  add(t, {"s_sext_i32_i16"}, [](u32 a) { return u32(i32(a << 16) >> 16); });
  add(t, {"s_pack_ll_b32_b16"}, [](u32 a, u32 b) { return (a & 0xffff) | b << 16; });
  add(t, {"s_pack_lh_b32_b16"}, [](u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000u); });
  add(t, {"s_pack_hh_b32_b16"}, [](u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); });
  add(t, {"s_bitset1_b32"}, [](u32 old, u32 bit) { return old | 1u << (bit & 31); }, kAccumulates);
  add(t, {"s_bitset0_b32"}, [](u32 old, u32 bit) { return old & ~(1u << (bit & 31)); }, kAccumulates);
  add(t, {"s_mov_b32", "s_movk_i32"}, [](u32 a) { return a; });
  add(t, {"s_mov_b64"}, [](u64 a) { return a; });
}

void add_comparisons(OpcodeTable& t) {
  add_compare(t, {"s_cmp_eq_i32", "s_cmpk_eq_i32"}, [](i32 a, i32 b) { return a == b; });
  add_compare(t, {"s_cmp_lg_i32", "s_cmpk_lg_i32"}, [](i32 a, i32 b) { return a != b; });
  add_compare(t, {"s_cmp_gt_i32", "s_cmpk_gt_i32"}, [](i32 a, i32 b) { return a > b; });
  add_compare(t, {"s_cmp_ge_i32", "s_cmpk_ge_i32"}, [](i32 a, i32 b) { return a >= b; });
  add_compare(t, {"s_cmp_lt_i32", "s_cmpk_lt_i32"}, [](i32 a, i32 b) { return a < b; });
  add_compare(t, {"s_cmp_le_i32", "s_cmpk_le_i32"}, [](i32 a, i32 b) { return a <= b; });
  add_compare(t, {"s_cmp_eq_u32", "s_cmpk_eq_u32"}, [](u32 a, u32 b) { return a == b; });
  add_compare(t, {"s_cmp_lg_u32", "s_cmpk_lg_u32"}, [](u32 a, u32 b) { return a != b; });
  add_compare(t, {"s_cmp_gt_u32", "s_cmpk_gt_u32"}, [](u32 a, u32 b) { return a > b; });
  add_compare(t, {"s_cmp_ge_u32", "s_cmpk_ge_u32"}, [](u32 a, u32 b) { return a >= b; });
  add_compare(t, {"s_cmp_lt_u32", "s_cmpk_lt_u32"}, [](u32 a, u32 b) { return a < b; });
  add_compare(t, {"s_cmp_le_u32", "s_cmpk_le_u32"}, [](u32 a, u32 b) { return a <= b; });
  add_compare(t, {"s_cmp_eq_u64"}, [](u64 a, u64 b) { return a == b; });
  add_compare(t, {"s_cmp_lg_u64"}, [](u64 a, u64 b) { return a != b; });
  add_compare(t, {"s_bitcmp0_b32"}, [](u32 a, u32 b) { return !(a >> (b & 31) & 1); });
  add_compare(t, {"s_bitcmp1_b32"}, [](u32 a, u32 b) { return bool(a >> (b & 31) & 1); });
}

}  // namespace

void add_scalar(OpcodeTable& t) {
  add_arithmetic(t);
  add_bit_operations(t);
  add_comparisons(t);
  add_logic<Logic::op_and>(t, "and", "and");
  add_logic<Logic::op_or>(t, "or", "or");
  add_logic<Logic::op_xor>(t, "xor", "xor");
  add_logic<Logic::op_andn2>(t, "andn2", "and_not1");
  add_logic<Logic::op_orn2>(t, "orn2", "or_not1");
  add_logic<Logic::op_nand>(t, "nand", "nand");
  add_logic<Logic::op_nor>(t, "nor", "nor");
  add_logic<Logic::op_xnor>(t, "xnor", "xnor");
  add_saveexec<Logic::op_and>(t, {"s_and_saveexec_b32"}, {"s_and_saveexec_b64"});
  add_saveexec<Logic::op_or>(t, {"s_or_saveexec_b32"}, {"s_or_saveexec_b64"});
  add_saveexec<Logic::op_xor>(t, {"s_xor_saveexec_b32"}, {"s_xor_saveexec_b64"});
  add_saveexec<Logic::op_andn2>(t, {"s_and_not1_saveexec_b32", "s_andn2_saveexec_b32"},
                                {"s_and_not1_saveexec_b64", "s_andn2_saveexec_b64"});
  t.add({"s_cselect_b32"}, {"", run_cselect<u32>, Class::salu, 1, Literal::b32, kReadsScc, 0, 3});
  t.add({"s_cselect_b64"}, {"", run_cselect<u64>, Class::salu, 1, Literal::b64, kReadsScc, 0, 3});
  t.add({"s_cmov_b32", "s_cmovk_i32"},
        {"", run_cmov<u32>, Class::salu, 1, Literal::b32, kReadsScc | kReadsResult, 0, 2});
}

}  // namespace gfxsim
