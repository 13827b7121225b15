// The online softmax of a wave's queries (core/softmax.h), with the rescaling put off.
//
// m follows the running maximum lazily: it is raised, and l and O rescaled, only when a score exceeds it by more than
// 2^8, decided for the whole wave at once. Until then p is at most 2^8, which fp32 sums, bf16 and fp16 hold without
// loss, and l and O refer to the same m, so the result is exact. Maxima need crossing lanes only when that happens, and
// l only at the end.
#pragma once

#include "hip/kernels/output.h"

namespace flash_attn::gpu {

template <class Engine, int kKept>
class OnlineSoftmax {
  static constexpr int kSlots = Engine::kKeptPerLane;
  static constexpr float kSlack = 8.0f;  // log2 units

 public:
  FA_DEVICE void clear() {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      m_[kept][slot] = -kInf;
      l_[kept][slot] = 0;
    }
  }

  // Scores, which times `unit` are in log2 units, become p = exp2(score - m). o is what has been summed with earlier p.
  template <int kStreamed, int kTiles>
  FA_DEVICE void step(ScoreTiles<Engine, kKept, kStreamed>& scores, OutputTiles<Engine, kKept, kTiles>& o, float unit) {
    using Scores = ScoreTiles<Engine, kKept, kStreamed>;
    float top[kKept][kSlots];
    bool high = false;
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      float x = -kInf;
      FA_UNROLL
      for (int r = 0; r < Scores::kFlat; ++r)
        if (Engine::kept_slot(r) == slot) x = maximum(x, scores.get(kept, r));
      top[kept][slot] = x * unit;
      high |= top[kept][slot] > m_[kept][slot] + kSlack;
    }
    if (any(high)) raise(top, o);
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      // Where nothing has been seen, masked scores must give 0 and not NaN.
      const float shift = m_[kept][slot] == -kInf ? 0.0f : m_[kept][slot];
      Pair sum = {0.0f, 0.0f};
      FA_UNROLL
      for (int r = 0; r < Scores::kFlat; r += 2) {
        if (Engine::kept_slot(r) != slot) continue;
        const Pair s = {scores.get(kept, r), scores.get(kept, r + 1)};
        const Pair x = fma(s, Pair{unit, unit}, Pair{-shift, -shift});
        const Pair p = {exp2(x[0]), exp2(x[1])};
        scores.set(kept, r, p[0]);
        scores.set(kept, r + 1, p[1]);
        sum = sum + p;
      }
      l_[kept][slot] += sum[0] + sum[1];
    }
  }

  // To be called once, before factor() and lse().
  FA_DEVICE void finish() {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot)
      l_[kept][slot] = Engine::fold(l_[kept][slot], [](float a, float b) { return a + b; });
  }
  // O times this is the output: 0 for a row that saw no key.
  FA_DEVICE float factor(int kept, int slot) const { return empty(kept, slot) ? 0.0f : reciprocal(l_[kept][slot]); }
  // Natural log-sum-exp; `of_none` for a row that saw no key.
  FA_DEVICE float lse(int kept, int slot, float of_none) const {
    return empty(kept, slot) ? of_none : (m_[kept][slot] + log2(l_[kept][slot])) * float(kLn2);
  }

 private:
  // By bits, so that a sum of NaN is none (lse_to_log2).
  FA_DEVICE bool empty(int kept, int slot) const { return bit_cast<u32>(l_[kept][slot]) == 0; }

  template <int kTiles>
  FA_DEVICE void raise(float (&top)[kKept][kSlots], OutputTiles<Engine, kKept, kTiles>& o) {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      const float m = m_[kept][slot];
      const float raised = maximum(m, Engine::fold(top[kept][slot], [](float a, float b) { return maximum(a, b); }));
      const float factor = m == -kInf ? 0.0f : exp2(m - raised);
      m_[kept][slot] = raised;
      l_[kept][slot] *= factor;
      o.scale(kept, slot, factor);
    }
  }

  float m_[kKept][kSlots], l_[kKept][kSlots];
};

}  // namespace flash_attn::gpu
