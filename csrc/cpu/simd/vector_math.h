// Softmax weights and tanh over any vector type V with fp32 lanes. Coefficients: minimax fits of this project.
#pragma once

#include "core/platform.h"

namespace flash_attn::cpu {

// (2^f - 1) / f for a table of so many steps, so that step * 2^f = step + step f times this: a parabola on
// [-1/16, 1/16] (relative error of 2^f 2.5e-8), a line on [-1/64, 1/64] (5.3e-8), and without a table of fractions, on
// [-1/2, 1/2], degree 5 (3.0e-9; degree 4 has 9.3e-8).
template <int Steps, class V>
FA_INLINE V exp2_slope(V f) {
  static_assert(Steps == 1 || Steps >= 8);
  if constexpr (Steps >= 32) return fma(V(0.24022653f), f, V(0.69315733f));
  if constexpr (Steps >= 8) return fma(fma(V(0.0554962218091f), f, V(0.24025763004f)), f, V(0.693147214261f));
  V y = V(0.000153264627f);
  y = fma(y, f, V(0.00133908063f));
  y = fma(y, f, V(0.00961850584f));
  y = fma(y, f, V(0.0555035993f));
  y = fma(y, f, V(0.240226477f));
  return fma(y, f, V(0.693147182f));
}

// 1.5 * 2^23 / Steps: adding it rounds to the next of so many steps of 1 and leaves the step's number in the low bits.
template <int Steps>
inline constexpr float kExp2Shift = 12582912.0f / Steps;

// Softmax weights below 2^this are 0: a sum that holds 2^0 shows nothing of them. Times V they would make subnormal
// numbers, each of which takes Intel's processors more than 100 cycles (Intel 64 and IA-32 Architectures Optimization
// Reference Manual, on floating-point assists); with ALiBi a row has hundreds.
inline constexpr float kLeastWeight = -100.0f, kTwoToLeastWeight = 7.88860905e-31f;

// 2^x for x < 128 within 2 ulp, 0 below kLeastWeight. V provides zero_below(y, x, bound), which is 0 where x < bound,
// and exp2_steps<Steps>(t) = 2^(n / Steps) for the integer n in the low bits of t: a table's entry by the lowest bits
// of n, whose other bits belong to the exponent. An entry's bits are those of 2^(k / Steps) less k shifted to the
// exponent's end, so that the whole of n can be added to them. Steps of what is to be 0 are 0 too, so that none of them
// is subnormal.
template <int Steps, class V>
FA_INLINE V weight_by_table(V x) {
  const V t = x + V(kExp2Shift<Steps>);
  const V f = x - (t - V(kExp2Shift<Steps>));
  const V step = zero_below(exp2_steps<Steps>(t), x, kLeastWeight);
  return zero_below(fma(step * f, exp2_slope<Steps>(f), step), x, kLeastWeight);
}

// The same for where products keep the multipliers busy, which do a Zen 4's comparisons: 2^x - 2^kLeastWeight, of which
// the difference does not show from -75 on, and which is 0 below kLeastWeight since x is taken no lower.
// In stages, so that products can come between them.
template <class V>
struct WeightInWork {
  V x, step;  // At first step is of no matter, at last x is the weight.
};
inline constexpr int kWeightStages = 4;
template <int Steps, int Stage, class V>
FA_INLINE void weigh_by_adders(WeightInWork<V>& w) {
  static_assert(Stage < kWeightStages);
  if constexpr (Stage == 0) w.x = vmax(V(kLeastWeight), w.x);  // NaN stays.
  if constexpr (Stage == 1) {
    w.step = w.x + V(kExp2Shift<Steps>);
    w.x = w.x - (w.step - V(kExp2Shift<Steps>));
  }
  if constexpr (Stage == 2) w.step = exp2_steps<Steps>(w.step);
  if constexpr (Stage == 3) w.x = fma(w.step * w.x, exp2_slope<Steps>(w.x), w.step - V(kTwoToLeastWeight));
}
template <int Steps, class V>
FA_INLINE V weight_by_adders(V x) {
  WeightInWork<V> w{x, x};
  weigh_by_adders<Steps, 0>(w), weigh_by_adders<Steps, 1>(w), weigh_by_adders<Steps, 2>(w),
      weigh_by_adders<Steps, 3>(w);
  return w.x;
}

// 2^x for x < 128 without a table: relative error 2e-9 on [-1/2, 1/2]. Below -150 the result is 0; V provides
// round_to_int(x) and scale_by_power(y, n) = y * 2^n.
template <class V>
FA_INLINE V exp2_polynomial(V x) {
  x = vmax(V(-150.0f), x);
  const V n = round_to_int(x);
  const V f = x - n;
  V y = V(0.000153458121613f);
  y = fma(y, f, V(0.00133999311772f));
  y = fma(y, f, V(0.00961848895633f));
  y = fma(y, f, V(0.0555032877711f));
  y = fma(y, f, V(0.240226468906f));
  y = fma(y, f, V(0.693147205737f));
  y = fma(y, f, V(1.0f));
  return scale_by_power(y, n);
}

// How the functions below divide: by the instruction.
struct ByDivision {
  template <class V>
  FA_INLINE V operator()(V n, V d) const {
    return n / d;
  }
  template <class V>
  static FA_INLINE V finite(V d) {
    return d;  // What the instruction divides by may be infinite.
  }
};

// tanh(x) = x P(z) / Q(z) = x + x z N(z) / Q(z), z = x^2, N = (P - Q) / z: relative error 3e-8 (and some roundings) up
// to 8.7, past which tanh is 1 in fp32. Below 1 the second form leaves little but the rounding of its sum; above, that
// sum would cancel.
template <class V, class Divide = ByDivision>
FA_INLINE V tanh_rational(V x, Divide divide = {}) {
  x = vmin(V(8.7f), vmax(V(-8.7f), x));
  const V z = x * x;
  V n = V(-7.857562846e-07f);
  n = fma(n, z, V(-0.000311371137f));
  n = fma(n, z, V(-0.02244615288f));
  n = fma(n, z, V(-0.3333332023f));
  V p = V(1.389766198e-08f);
  p = fma(p, z, V(2.099385309e-05f));
  p = fma(p, z, V(0.003518745142f));
  p = fma(p, z, V(0.1340046756f));
  p = fma(p, z, V(0.9999999852f));
  V q = V(7.99653948e-07f);
  q = fma(q, z, V(0.0003323649902f));
  q = fma(q, z, V(0.02596489802f));
  q = fma(q, z, V(0.4673378779f));
  q = fma(q, z, V(1.0f));
  const V one = V(1.0f);
  return fma(x, divide(select_less(z, one, z * n, p), q), select_less(z, one, x, V(0.0f)));
}

// inside where begin <= x < end, else outside.
template <class V>
FA_INLINE V select_between(V x, V begin, V end, V inside, V outside) {
  return select_less(x, begin, outside, select_less(x, end, inside, outside));
}

// tanh(x * factor) = 1 - 1 / (1/2 + 2^y), y = 2 log2(e) x factor - 1: within 2.5e-7, so that what is small keeps few
// digits, but with two thirds of the operations of tanh_rational. V provides vexp2(y) = 2^y, 0 and infinity
// included.
template <class V, class Divide = ByDivision>
FA_INLINE V tanh_by_exp2(V x, V factor, Divide divide = {}) {
  const V y = fma(x, factor * V(2.885390082f), V(-1.0f));
  return V(1.0f) - divide(V(1.0f), Divide::finite(V(0.5f) + vexp2(y)));
}

}  // namespace flash_attn::cpu
