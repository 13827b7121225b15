// 16, 32 and 64-bit floating point arithmetic. Rounding is to nearest even and denormals are kept: launches of kernels
// that ask for anything else are refused.
#include "opcode_table.h"

namespace gfxsim {
namespace {

template <class T>
bool is_nan(T x) {
  return x != x;
}

bool is_signalling(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return (bits & 0x7fffffffu) > 0x7f800000u && !(bits & 0x400000u);
}

// The number if only one is a number; +0 is above -0.
template <class T>
T maximum(T a, T b) {
  const bool first = is_nan(b) || a > b || (a == b && !std::signbit(a));
  return is_nan(a) ? b : first ? a : b;
}
template <class T>
T minimum(T a, T b) {
  const bool first = is_nan(b) || a < b || (a == b && std::signbit(a));
  return is_nan(a) ? b : first ? a : b;
}

// Before gfx12: with the IEEE bit set, a signalling NaN wins and becomes quiet.
template <class F>
void run_extremum(Wave& wave, const Op& op) {
  const auto a = load<float>(wave, op, 1), b = load<float>(wave, op, 2);
  Lanes<float> out;
  for (int i = 0; i < kMaxLanes; ++i)
    out[i] = wave.ieee && (is_signalling(a[i]) || is_signalling(b[i])) ? a[i] + b[i] : F{}(a[i], b[i]);
  const std::uint64_t defined = value_defined<float>(wave, op, 1) & value_defined<float>(wave, op, 2);
  store(wave, op, 0, out, {defined, defined});
}
template <class F>
void add_extremum(OpcodeTable& t, const char* name, F) {
  constexpr std::uint32_t traits = kAcceptsClamp | kAcceptsDpp;
  t.add({name}, {"", run_extremum<F>, Class::valu, 1, Literal::b32, traits, 0, 3});
}

// AMD's definition: min3 when one is NaN, else the operand that is neither the maximum nor the minimum.
float median(float a, float b, float c) {
  if (is_nan(a) || is_nan(b) || is_nan(c)) return minimum(minimum(a, b), c);
  const float top = maximum(maximum(a, b), c);
  if (top == a) return maximum(b, c);
  if (top == b) return maximum(a, c);
  return maximum(a, b);
}

void add_float32(OpcodeTable& t) {
  t.vector({"v_add_f32"}, [](float a, float b) { return a + b; });
  t.vector({"v_sub_f32"}, [](float a, float b) { return a - b; });
  t.vector({"v_subrev_f32"}, [](float a, float b) { return b - a; });
  t.vector({"v_mul_f32"}, [](float a, float b) { return a * b; });
  t.vector({"v_fma_f32"}, [](float a, float b, float c) { return std::fma(a, b, c); });
  t.vector({"v_fmac_f32"}, [](float a, float b, float c) { return std::fma(a, b, c); }, kAccumulates);
  t.vector({"v_fmaak_f32"}, [](float a, float b, float c) { return std::fma(a, b, c); });
  t.vector({"v_fmamk_f32"}, [](float a, float b, float c) { return std::fma(a, b, c); });
  add_extremum(t, "v_max_f32", [](float a, float b) { return maximum(a, b); });
  add_extremum(t, "v_min_f32", [](float a, float b) { return minimum(a, b); });
  t.vector({"v_max_num_f32"}, [](float a, float b) { return maximum(a, b); });
  t.vector({"v_min_num_f32"}, [](float a, float b) { return minimum(a, b); });
  t.vector({"v_max3_num_f32", "v_max3_f32"}, [](float a, float b, float c) { return maximum(maximum(a, b), c); });
  t.vector({"v_min3_num_f32", "v_min3_f32"}, [](float a, float b, float c) { return minimum(minimum(a, b), c); });
  t.vector({"v_minmax_num_f32"}, [](float a, float b, float c) { return maximum(minimum(a, b), c); });
  t.vector({"v_maxmin_num_f32"}, [](float a, float b, float c) { return minimum(maximum(a, b), c); });
  t.vector({"v_med3_num_f32", "v_med3_f32"}, [](float a, float b, float c) { return median(a, b, c); });
  t.vector({"v_floor_f32"}, [](float a) { return std::floor(a); });
  t.vector({"v_ceil_f32"}, [](float a) { return std::ceil(a); });
  t.vector({"v_trunc_f32"}, [](float a) { return std::trunc(a); });
  t.vector({"v_rndne_f32"}, [](float a) { return std::nearbyint(a); });
  t.vector({"v_ldexp_f32"}, [](float a, std::int32_t exponent) { return std::ldexp(a, exponent); });
}

void add_float16(OpcodeTable& t) {
  // float has more than twice the bits of half plus two: rounding its sums and products to half rounds once.
  t.vector({"v_add_f16"}, [](Half a, Half b) { return to_half(to_float(a) + to_float(b)); });
  t.vector({"v_sub_f16"}, [](Half a, Half b) { return to_half(to_float(a) - to_float(b)); });
  t.vector({"v_subrev_f16"}, [](Half a, Half b) { return to_half(to_float(b) - to_float(a)); });
  t.vector({"v_mul_f16"}, [](Half a, Half b) { return to_half(to_float(a) * to_float(b)); });
  t.vector({"v_fma_f16"}, [](Half a, Half b, Half c) { return half_fma(a, b, c); }, kReadsResult);
  t.vector({"v_fmac_f16"}, [](Half a, Half b, Half c) { return half_fma(a, b, c); }, kAccumulates);
  t.vector({"v_max_num_f16", "v_max_f16"}, [](Half a, Half b) { return to_half(maximum(to_float(a), to_float(b))); });
  t.vector({"v_min_num_f16", "v_min_f16"}, [](Half a, Half b) { return to_half(minimum(to_float(a), to_float(b))); });
}

void add_float64(OpcodeTable& t) {
  t.vector({"v_add_f64"}, [](double a, double b) { return a + b; });
  t.vector({"v_mul_f64"}, [](double a, double b) { return a * b; });
  t.vector({"v_fma_f64"}, [](double a, double b, double c) { return std::fma(a, b, c); });
}

// Chooses the exponent adjustment of a division a / b: see the instruction sequence that compilers emit for fdiv.
struct Scaled {
  float value;
  bool flag;
};
int exponent(float x) { return int(std::bit_cast<std::uint32_t>(x) >> 23 & 0xff); }
bool is_denormal(float x) { return x != 0.0f && exponent(x) == 0; }

// AMD's pseudocode, but for denominators whose reciprocal is denormal: scaled down always, as the transcendental unit
// would flush the reciprocal (the pseudocode tests for this in double precision, where it never happens).
Scaled div_scale(float s0, float denominator, float numerator) {
  if (numerator == 0.0f || denominator == 0.0f) return {std::nanf(""), false};
  if (exponent(numerator) - exponent(denominator) >= 96) return {s0 == denominator ? std::ldexp(s0, 64) : s0, true};
  if (is_denormal(denominator)) return {std::ldexp(s0, 64), false};
  if (is_denormal(1.0f / denominator)) return {std::ldexp(s0, -64), false};
  if (is_denormal(numerator / denominator)) return {s0 == numerator ? std::ldexp(s0, 64) : s0, true};
  if (exponent(numerator) <= 23) return {std::ldexp(s0, 64), false};
  return {s0, false};
}

float div_fixup(float quotient, float denominator, float numerator) {
  const bool negative = std::signbit(denominator) != std::signbit(numerator);
  const float infinity = negative ? -HUGE_VALF : HUGE_VALF, zero = negative ? -0.0f : 0.0f;
  if (is_nan(numerator)) return numerator + numerator;
  if (is_nan(denominator)) return denominator + denominator;
  if (denominator == 0.0f && numerator == 0.0f) return std::bit_cast<float>(0xffc00000u);
  if (std::isinf(denominator) && std::isinf(numerator)) return std::bit_cast<float>(0xffc00000u);
  if (denominator == 0.0f || std::isinf(numerator)) return infinity;
  if (std::isinf(denominator) || numerator == 0.0f) return zero;
  if (exponent(numerator) - exponent(denominator) < -150) return zero;
  if (exponent(denominator) == 255) return infinity;
  return negative ? -std::fabs(quotient) : std::fabs(quotient);
}

void run_div_scale(Wave& wave, const Op& op) {
  const auto s0 = load<float>(wave, op, 2), s1 = load<float>(wave, op, 3), s2 = load<float>(wave, op, 4);
  const std::uint64_t defined =
      value_defined<float>(wave, op, 2) & value_defined<float>(wave, op, 3) & value_defined<float>(wave, op, 4);
  const std::uint64_t exec = wave.exec();
  Lanes<float> out;
  std::uint64_t flags = 0;
  for (int i = 0; i < kMaxLanes; ++i) {
    const Scaled scaled = div_scale(s0[i], s1[i], s2[i]);
    out[i] = scaled.value;
    flags |= std::uint64_t(scaled.flag) << i;
  }
  store(wave, op, 0, out, {defined, defined});
  write_mask(wave, op, op.operand[1], flags & exec, defined | ~exec);
}

void run_div_fmas(Wave& wave, const Op& op) {
  const auto a = load<float>(wave, op, 1), b = load<float>(wave, op, 2), c = load<float>(wave, op, 3);
  const std::uint64_t scale = wave.read_mask(kVcc);
  const std::uint64_t defined = value_defined<float>(wave, op, 1) & value_defined<float>(wave, op, 2) &
                                value_defined<float>(wave, op, 3) & wave.defined_mask(kVcc);
  Lanes<float> out;
  for (int i = 0; i < kMaxLanes; ++i) {
    // The quotient goes up or down by 2^64, whichever way the numerator or denominator was scaled, and is rounded once.
    const double factor = !(scale >> i & 1) ? 1.0 : exponent(c[i]) > 127 ? 0x1p64 : 0x1p-64;
    out[i] = float(fma_to_odd(a[i], b[i], c[i]) * factor);
  }
  store(wave, op, 0, out, {defined, defined});
}

}  // namespace

void add_float(OpcodeTable& t) {
  add_float32(t);
  add_float16(t);
  add_float64(t);
  t.add({"v_div_scale_f32"}, {"", run_div_scale, Class::valu, 2, Literal::b32, 0, 0, 5});
  t.add({"v_div_fmas_f32"}, {"", run_div_fmas, Class::valu, 1, Literal::b32, kReadsVcc, 0, 4});
  t.vector({"v_div_fixup_f32"}, [](float q, float d, float n) { return div_fixup(q, d, n); });
}

}  // namespace gfxsim
