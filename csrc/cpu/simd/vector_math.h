// exp2 and tanh over any vector type V with fp32 lanes. Coefficients: minimax fits of this project.
#pragma once

#include "core/platform.h"

namespace flash_attn::cpu {

// 2^x for x < 128, by a table of 2^(k / V::kExp2Entries) and a cubic (relative error 2.5e-8 on [-1/16, 1/16]). Below
// -126 the result is 0. V provides exp2_steps(t) = 2^(n / V::kExp2Entries) for the integer n in the low bits of t, and
// zero_below(y, x, bound), which is 0 where x < bound. The steps come from a table by the lowest bits of n; what is
// left of n belongs to the exponent. An entry's bits are those of 2^(k / kExp2Entries) less k shifted to the exponent's
// end, so that the whole of n can be added to them.
template <class V>
FA_INLINE V exp2_by_table(V x) {
  // Adding 1.5 * 2^23 / kExp2Entries rounds x to the next step and leaves its number in the low bits.
  constexpr float kShift = 12582912.0f / V::kExp2Entries;
  const V t = x + V(kShift);
  const V f = x - (t - V(kShift));
  const V step = exp2_steps(t);
  V y = V(0.0554962218091f);
  y = fma(y, f, V(0.24025763004f));
  y = fma(y, f, V(0.693147214261f));
  return zero_below(fma(step * f, y, step), x, -126.0f);
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

// tanh(x) = x P(z) / Q(z) = x + x z N(z) / Q(z), z = x^2, N = (P - Q) / z: relative error 3e-8 (and some roundings) up
// to 8.7, past which tanh is 1 in fp32. Below 1 the second form leaves little but the rounding of its sum; above, that
// sum would cancel.
template <class V>
FA_INLINE V tanh_rational(V x) {
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
  return fma(x, select_less(z, one, z * n, p) / q, select_less(z, one, x, V(0.0f)));
}

}  // namespace flash_attn::cpu
