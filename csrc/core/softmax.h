// The online-softmax state of one row: (m, l), to which the caller keeps o = sum of p * v beside it.
//
// FlashAttention-2, Algorithm 1 (https://arxiv.org/abs/2307.08691), in base 2: scores are in log2 units, so that
// p = exp2(score - m), which is what vector units have. Empty is m = -inf, l = 0.
#pragma once

#include <cmath>
#include <limits>

#include "core/platform.h"

namespace flash_attn {

inline constexpr double kLog2e = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

template <class Real>
struct SoftmaxState {
  Real m = -std::numeric_limits<Real>::infinity();  // Largest score so far.
  Real l = Real(0);                                 // Sum of exp2(score - m) so far.

  FA_INLINE bool empty() const { return l == Real(0); }

  // What exp2 subtracts: m, or 0 while nothing has been seen, so that masked scores (-inf) give 0 and not NaN.
  FA_INLINE Real shift() const { return m == -std::numeric_limits<Real>::infinity() ? Real(0) : m; }

  // Takes in the maximum of the next block and returns the factor for what was summed so far (l here, o at the caller).
  FA_INLINE Real raise(Real block_max) {
    if (!(block_max > m)) return Real(1);
    const Real factor = l == Real(0) ? Real(0) : Real(std::exp2(m - block_max));
    m = block_max;
    l *= factor;
    return factor;
  }

  // The state of two disjoint sets of keys together; the factors are for their o.
  FA_INLINE void merge(SoftmaxState other, Real& factor_this, Real& factor_other) {
    const Real l_this = l;
    factor_this = raise(other.m);
    factor_other = other.l == Real(0) ? Real(0) : Real(std::exp2(other.m - m));
    if (l_this == Real(0)) factor_this = Real(0);
    l += other.l * factor_other;
  }

  // o * finish() is the attention output: 0 for a row that saw no key.
  FA_INLINE Real finish() const { return empty() ? Real(0) : Real(1) / l; }

  // Natural log-sum-exp; +inf for a row that saw no key (the FA2 convention).
  FA_INLINE Real lse() const {
    return empty() ? std::numeric_limits<Real>::infinity() : Real((m + std::log2(l)) * Real(kLn2));
  }
};

}  // namespace flash_attn
