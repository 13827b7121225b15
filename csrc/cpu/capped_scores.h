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

}  // namespace flash_attn::cpu
