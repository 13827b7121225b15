// What a row's softmax state comes to when its last key was seen, for several rows at a time.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/softmax.h"

namespace flash_attn::cpu {

// log2 of a positive normal number within 3 ulp, exact for powers of 2; NaN for NaN and infinities. No branches and no
// calls, for loops that compilers vectorise. x = 2^e m with m in [sqrt(1/2), sqrt(2)), log2(m) = s P(s^2) with s = (m -
// 1) / (m + 1): a minimax fit of this project, relative error 7e-10.
FA_INLINE float log2_in_loops(float x) {
  // Unsigned: scores beyond 5e7 give sums of any bits, and a signed difference of those may overflow.
  const auto bits = std::bit_cast<std::uint32_t>(x);
  constexpr std::uint32_t kRootOfHalf = 0x3f3504f3;
  const std::int32_t e = static_cast<std::int32_t>(bits - kRootOfHalf) >> 23;
  const float m = std::bit_cast<float>(bits - (static_cast<std::uint32_t>(e) << 23));
  const float s = (m - 1.0f) / (m + 1.0f), u = s * s;
  const float p = 2.88539004f + u * (0.961798847f + u * (0.576714396f + u * 0.431735933f));
  return static_cast<float>(e) + s * p + (x - x);
}
FA_INLINE double log2_in_loops(double x) { return std::log2(x); }

template <class Real>
struct RowEnds {
  static constexpr index_t kRows = 16;
  Real lse[kRows];     // SoftmaxState::lse
  Real factor[kRows];  // SoftmaxState::finish times a factor
  index_t rows;        // Of which those that come later are meaningless.

  FA_INLINE RowEnds(const SoftmaxState<Real>* state, const Real* factors, index_t count) : rows(count) {
    Real m[kRows] = {}, l[kRows];
    for (Real& of_row : l) of_row = Real(1);
    for (index_t r = 0; r < rows; ++r) {
      const bool empty = state[r].empty();
      m[r] = empty ? std::numeric_limits<Real>::infinity() : state[r].m;
      l[r] = empty ? Real(1) : state[r].l;
      factor[r] = empty ? Real(0) : factors[r];
    }
    for (index_t r = 0; r < kRows; ++r) lse[r] = (m[r] + log2_in_loops(l[r])) * Real(kLn2);
    for (index_t r = 0; r < kRows; ++r) l[r] = Real(1) / l[r];
    for (index_t r = 0; r < rows; ++r) factor[r] *= l[r];
  }

  FA_INLINE void store_lse(Real* out, index_t step) const {
    for (index_t r = 0; r < rows; ++r) out[r * step] = lse[r];
  }
};

}  // namespace flash_attn::cpu
