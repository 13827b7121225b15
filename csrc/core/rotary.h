// Rotary position embedding of one row (Su et al., "RoFormer", https://arxiv.org/abs/2104.09864): a pair (a, b) becomes
// (a cos - b sin, a sin + b cos), in fp32, or fp64 for fp64.
#pragma once

#include "core/numeric.h"
#include "core/problem.h"

namespace flash_attn {

template <class T>
FA_INLINE T rounded(float x) {
  return from_float<T>(x);
}
template <class T>
FA_INLINE T rounded(double x) {
  return x;
}

/// out[0, features): the row at `position`; what lies past the rotated features is copied. out may be x.
template <class T>
void rotate(const Rotary& rotary, index_t position, const T* x, index_t features, T* out) {
  const T* const cos = static_cast<const T*>(rotary.cos) + position * rotary.half;
  const T* const sin = static_cast<const T*>(rotary.sin) + position * rotary.half;
  for (index_t n = 0; n < rotary.half; ++n) {
    const index_t first = rotary.interleaved ? 2 * n : n, second = rotary.interleaved ? 2 * n + 1 : n + rotary.half;
    const auto a = to_float(x[first]), b = to_float(x[second]), c = to_float(cos[n]), s = to_float(sin[n]);
    out[first] = rounded<T>(a * c - b * s);
    out[second] = rounded<T>(a * s + b * c);
  }
  for (index_t d = 2 * rotary.half; d < features; ++d) out[d] = x[d];
}

}  // namespace flash_attn
