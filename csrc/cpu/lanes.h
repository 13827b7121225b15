// Queries in the lanes (forward_lanes.h): for which sequences, and the memory that it takes.
#pragma once

#include "cpu/cpuid.h"
#include "cpu/score_tables.h"
#include "cpu/target.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

inline constexpr index_t kLaneQueries = 32;

// Whether a sequence leaves few lanes of its last queries empty.
FA_INLINE bool fills_lanes(const Sequence& sequence) {
  return round_up(sequence.q_len, kLaneQueries) * 8 <= sequence.q_len * 9;
}

// Whether rows of a sequence see so few keys that what strips do once a row shows. A row's result depends on its own
// sequence alone.
FA_INLINE bool sees_few_keys(const Problem& p, const Sequence& sequence) {
  constexpr index_t kFew = 768;
  if (p.window_left >= 0 && p.window_right >= 0) return true;
  const bool causal = p.window_left < 0 && p.window_right >= 0;
  return sequence.k_len - (causal ? min_of(sequence.q_len, sequence.k_len) / 2 : 0) <= kFew;
}

// Most bytes of a row of multiplicands with which that is faster than strips. Rows of 512 bytes gain nothing on a Zen
// 5, and windows of 128 keys are slower by 3 %; on a Zen 4 it is so from 256 bytes of fp32 on, whose tiles have fewer
// keys.
FA_INLINE index_t most_lane_bytes(Core core, index_t elem_size) {
  if (core == Core::zen4) return elem_size < index_t(sizeof(float)) ? 256 : 128;
  return core == Core::zen5 ? 384 : 0;
}

// Whether that is how kernels compute it that take products over up to `most_depth` features, 0 if over none. Where key
// blocks are packed in place, each head has to have its own, whatever the number of threads, and one block all keys.
FA_INLINE bool takes_lanes(const Problem& p, const Sequence& sequence, Approach approach, Tiles tiles,
                           index_t most_depth, index_t elem_size) {
  const bool reached = approach == Approach::packed ||
                       (approach == Approach::in_place && p.group() == 1 && sequence.k_len <= tiles.keys);
  return reached && p.D <= most_depth && p.D * elem_size <= most_lane_bytes(core(), elem_size) && has_plain_scores(p) &&
         p.softcap == 0 && !p.dropout.active && fills_lanes(sequence) && sees_few_keys(p, sequence);
}

template <class Target>
struct Lanes {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  static constexpr bool kThere = Target::Simd::W == 16 && !Target::kTiled;
  static constexpr index_t kOfSum = kStepsPerSum<Target> * Target::Format::kStep;
  static constexpr index_t kMostDepth = kThere ? kOfSum : 0;
  // Vectors of queries that meet up to so many keys at a time.
  static constexpr int kVectors = 2;
  static constexpr index_t kQueries = kVectors * Target::Simd::W, kKeys = min_of<index_t>(288, kOfSum);
  static_assert(!kThere || kQueries == kLaneQueries);

  Elem* queries;     // depth x kQueries, a B operand
  Real* o;           // o_stride x kQueries
  Elem* weights[2];  // kKeys x kQueries each, B operands
  Real* scores[2];   // kKeys x kQueries each: the memory of weights if they are of the same type, else one for both

  static Lanes carve(Carver& c, index_t depth, index_t o_stride) {
    Lanes l{};
    l.queries = c.take<Elem>(depth * kQueries);
    l.o = c.take<Real>(o_stride * kQueries);
    for (Elem*& of_tile : l.weights) of_tile = c.take<Elem>(kKeys * kQueries);
    if constexpr (std::is_same_v<Elem, Real>) {
      for (int n = 0; n < 2; ++n) l.scores[n] = l.weights[n];
    } else {
      l.scores[0] = l.scores[1] = c.take<Real>(kKeys * kQueries);
    }
    return l;
  }
};

}  // namespace flash_attn::cpu
