// The first step of a softcap, which takes most of its time, over rows of dot products.
#pragma once

#include "core/score.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

// Where the rule has a softcap, the tanh of columns [begin, end), whole vectors, takes their place. A walk of its own:
// what follows would make a chain of operations so long that few vectors were in flight.
template <class Target>
FA_INLINE void cap_scores(const ScoreRule<typename Target::Real>& rule, typename Target::Real* x, Range columns) {
  using Simd = typename Target::Simd;
  if (!rule.has_softcap()) return;
  const typename Simd::V factor(rule.inverse_softcap);
  constexpr int kAbreast = 4;  // Chains of operations side by side, for the sake of their latency.
  index_t n = columns.begin;
  for (; n + kAbreast * Simd::W <= columns.end; n += kAbreast * Simd::W) {
    typename Simd::V t[kAbreast];
    for (int i = 0; i < kAbreast; ++i) t[i] = Target::Format::tanh_of_product(Simd::load(x + n + i * Simd::W), factor);
    for (int i = 0; i < kAbreast; ++i) Simd::store(x + n + i * Simd::W, t[i]);
  }
  for (; n < columns.end; n += Simd::W) Simd::store(x + n, Target::Format::tanh_of_product(Simd::load(x + n), factor));
}

// The same of the first two vectors of some rows, `stride` apart, two rows side by side; where their number is odd, of
// one more.
template <class Target>
FA_INLINE void cap_rows(const ScoreRule<typename Target::Real>& rule, typename Target::Real* x, index_t stride,
                        index_t rows) {
  using Simd = typename Target::Simd;
  const typename Simd::V factor(rule.inverse_softcap);
  for (index_t t = 0; t < rows; t += 2, x += 2 * stride) {
    typename Target::Real* const vectors[] = {x, x + Simd::W, x + stride, x + stride + Simd::W};
    typename Simd::V y[4];
    for (int i = 0; i < 4; ++i) y[i] = Target::Format::tanh_of_product(Simd::load(vectors[i]), factor);
    for (int i = 0; i < 4; ++i) Simd::store(vectors[i], y[i]);
  }
}

}  // namespace flash_attn::cpu
