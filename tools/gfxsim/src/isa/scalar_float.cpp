// Scalar floating point (gfx12): the vector instructions' arithmetic on one value.
#include "opcode_table.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using i32 = std::int32_t;

bool sources_defined(const Wave& wave, const Op& op) {
  for (int i = op.opcode->results; i < op.operands; ++i)
    if (!scalar_defined(wave, op.operand[i])) return false;
  return true;
}

template <class T>
T source(const Wave& wave, const Operand& operand) {
  u32 bits = u32(read_scalar(wave, operand));
  if (operand.absolute) bits &= 0x7fffffffu;
  if (operand.negate) bits ^= 0x80000000u;
  return from_bits<T>(bits);
}

template <class F>
void run(Wave& wave, const Op& op) {
  [&]<class R, class... A>(R (*)(A...)) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      const bool accumulates = op.opcode->traits & kAccumulates;
      const R result = F{}(source<A>(wave, op.operand[source_index(op, I, sizeof...(A))])...);
      const bool defined = sources_defined(wave, op) && (!accumulates || scalar_defined(wave, op.operand[0]));
      write_scalar(wave, op, op.operand[0], to_bits(result), defined ? ~std::uint64_t(0) : 0);
    }(std::index_sequence_for<A...>{});
  }(decltype(+F{})(nullptr));
}

template <class F>
void run_compare(Wave& wave, const Op& op) {
  wave.scc = F{}(source<float>(wave, op.operand[0]), source<float>(wave, op.operand[1]));
  wave.scc_defined = sources_defined(wave, op);
}

template <class F>
void add(OpcodeTable& t, Names names, F, u32 traits = 0) {
  constexpr int sources = Signature<decltype(+F{})>::sources;
  const int operands = traits & kAccumulates ? sources : sources + 1;
  t.add(names, {"", run<F>, Class::salu, 1, Literal::b32, traits, 0, std::uint8_t(operands)});
}
template <class F>
void add_compare(OpcodeTable& t, const char* name, F) {
  t.add({name}, {"", run_compare<F>, Class::salu, 0, Literal::b32, kWritesScc, 0, 2});
}

float max_num(float a, float b) { return a != a ? b : b != b || a > b || (a == b && !std::signbit(a)) ? a : b; }
float min_num(float a, float b) { return a != a ? b : b != b || a < b || (a == b && std::signbit(a)) ? a : b; }

}  // namespace

void add_scalar_float(OpcodeTable& t) {
  add(t, {"s_add_f32"}, [](float a, float b) { return a + b; });
  add(t, {"s_sub_f32"}, [](float a, float b) { return a - b; });
  add(t, {"s_mul_f32"}, [](float a, float b) { return a * b; });
  add(t, {"s_max_num_f32"}, [](float a, float b) { return max_num(a, b); });
  add(t, {"s_min_num_f32"}, [](float a, float b) { return min_num(a, b); });
  add(t, {"s_fmac_f32"}, [](float a, float b, float c) { return std::fma(a, b, c); }, kAccumulates);
  add(t, {"s_fmaak_f32", "s_fmamk_f32"}, [](float a, float b, float c) { return std::fma(a, b, c); });
  add(t, {"s_cvt_f32_u32"}, [](u32 a) { return float(a); });
  add(t, {"s_cvt_f32_i32"}, [](i32 a) { return float(a); });
  add(t, {"s_cvt_u32_f32"}, [](float a) { return !(a > 0.0f) ? 0u : a >= 0x1p32f ? ~0u : u32(a); });
  add(t, {"s_cvt_i32_f32"}, [](float a) {
    return a != a ? 0 : a >= 0x1p31f ? 0x7fffffff : a < -0x1p31f ? -0x7fffffff - 1 : i32(a);
  });
  add_compare(t, "s_cmp_lt_f32", [](float a, float b) { return a < b; });
  add_compare(t, "s_cmp_le_f32", [](float a, float b) { return a <= b; });
  add_compare(t, "s_cmp_gt_f32", [](float a, float b) { return a > b; });
  add_compare(t, "s_cmp_ge_f32", [](float a, float b) { return a >= b; });
  add_compare(t, "s_cmp_eq_f32", [](float a, float b) { return a == b; });
  add_compare(t, "s_cmp_lg_f32", [](float a, float b) { return a < b || a > b; });
  add_compare(t, "s_cmp_neq_f32", [](float a, float b) { return !(a == b); });
  add_compare(t, "s_cmp_nlt_f32", [](float a, float b) { return !(a < b); });
  add_compare(t, "s_cmp_nle_f32", [](float a, float b) { return !(a <= b); });
  add_compare(t, "s_cmp_ngt_f32", [](float a, float b) { return !(a > b); });
  add_compare(t, "s_cmp_nge_f32", [](float a, float b) { return !(a >= b); });
}

}  // namespace gfxsim
