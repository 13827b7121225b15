// The first step of a softcap, which takes most of its time, over rows of dot products.
#pragma once

#include "core/score.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

// The tanh of N vectors at x times the factor take their place. Chains of operations side by side, for the sake of
// their latency.
template <class Target, int N>
FA_INLINE void cap_abreast(typename Target::Simd::V factor, typename Target::Real* const (&x)[N]) {
  using Simd = typename Target::Simd;
  typename Simd::V t[N];
  for (int i = 0; i < N; ++i) t[i] = Target::Format::tanh_of_product(Simd::load(x[i]), factor);
  for (int i = 0; i < N; ++i) Simd::store(x[i], t[i]);
}

// Of columns [begin, end), whole vectors, where the rule has a softcap. A walk of its own: what follows would make a
// chain of operations so long that few vectors were in flight.
template <class Target>
FA_INLINE void cap_scores(const ScoreRule<typename Target::Real>& rule, typename Target::Real* x, Range columns) {
  using Simd = typename Target::Simd;
  constexpr index_t W = Simd::W;
  if (!rule.has_softcap()) return;
  const typename Simd::V factor(rule.inverse_softcap);
  index_t n = columns.begin;
  for (; n + 4 * W <= columns.end; n += 4 * W)
    cap_abreast<Target, 4>(factor, {x + n, x + n + W, x + n + 2 * W, x + n + 3 * W});
  for (; n < columns.end; n += W) cap_abreast<Target, 1>(factor, {x + n});
}

// Of the first two vectors of some rows, `stride` apart; of one more where their number is odd.
template <class Target>
FA_INLINE void cap_rows(const ScoreRule<typename Target::Real>& rule, typename Target::Real* x, index_t stride,
                        index_t rows) {
  using Simd = typename Target::Simd;
  constexpr index_t W = Simd::W;
  const typename Simd::V factor(rule.inverse_softcap);
  for (index_t t = 0; t < rows; t += 2, x += 2 * stride)
    cap_abreast<Target, 4>(factor, {x, x + W, x + stride, x + stride + W});
}

}  // namespace flash_attn::cpu
