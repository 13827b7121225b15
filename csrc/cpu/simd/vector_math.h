// exp2 and tanh over any vector type V with a Real lane type. Coefficients: minimax fits of this project (Remez
// exchange in 50-digit arithmetic), relative error 2e-9 for exp2 on [-1/2, 1/2] and 2e-10 for tanh on [0, 0.625].
#pragma once

#include "core/platform.h"

namespace flash_attn::cpu {

// 2^x for fp32 lanes. Below -150 the result is 0; V provides round_to_int(x) and scale_by_power(y, n) = y * 2^n.
template <class V>
FA_INLINE V exp2_polynomial(V x) {
  x = vmax(x, V(-150.0f));
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

// Near 0 the exponential form cancels, so small arguments take an odd polynomial.
template <class V>
FA_INLINE V tanh_by_parts(V x) {
  const V magnitude = vabs(x);
  const V z = x * x;
  V p = V(0.00216904741576f);
  p = fma(p, z, V(-0.00820861998355f));
  p = fma(p, z, V(0.0217147621765f));
  p = fma(p, z, V(-0.0539496866369f));
  p = fma(p, z, V(0.133332333072f));
  p = fma(p, z, V(-0.333333316759f));
  const V small = fma(p * z, x, x);
  // 40 is far past where tanh is 1 in fp32, and keeps exp2 finite.
  const V e = exp2(vmin(magnitude, V(40.0f)) * V(2.885390081777927f));
  const V large = copy_sign(V(1.0f) - V(2.0f) / (e + V(1.0f)), x);
  return select_less(magnitude, V(0.625f), small, large);
}

}  // namespace flash_attn::cpu
