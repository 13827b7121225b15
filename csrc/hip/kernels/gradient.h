// From scores to gradients of scores: FlashAttention-2, Algorithm 2, lines 11 to 15, for one number and for what a
// block needs of its queries.
#pragma once

#include "hip/kernels/dropout.h"

namespace flash_attn::gpu {

// P is 0 where the log-sum-exp is infinite: an LSE of either infinity means a row that sees no key. By bits, so that
// NaN stays NaN: the compiler need not honour it (FlashAttnGpu.cmake), and clang 22 selects by `v_cmp_lg_f32 |lse|,
// inf`.
FA_DEVICE float lse_to_log2(float lse) {
  constexpr u32 kMinusInfinity = 0xff800000u, kInfinity = 0x7f800000u;
  const u32 bits = bit_cast<u32>(lse);
  return bit_cast<float>(bits == kMinusInfinity ? kInfinity : bits) * float(kLog2e);
}

struct ScoreGradient {
  float p, ds;  // dropped P, which multiplies dO; gradient of softmax_scale * q.k
};

// dot: q.k; distance: diagonal(query) - key; dp: dO.v; delta: dO.out.
template <bool kGeneral>
FA_DEVICE ScoreGradient score_gradient(const ScoreRule<float>& rule, float dot, float distance, float dp,
                                       float lse_log2, float delta, bool keep, float keep_scale) {
  if constexpr (!kGeneral) {
    const float p = exp2(fma(dot, rule.scale_log2, -lse_log2));
    return {p, p * (dp - delta)};
  }
  const float p = exp2(rule.logit(Score(dot), Score(distance)).x - lse_log2);
  const float dropped = keep ? dp * keep_scale : 0.0f;
  return {keep ? p : 0.0f, p * (dropped - delta) * rule.slope_of_logit(Score(dot)).x};
}

// Which scores of a wave dropout keeps: bit r of a kept tile's word is register r.
template <class Engine, int kKept, int kStreamed>
struct KeepBits {
  static constexpr int kFlat = kStreamed * Engine::kRegisters;
  static_assert(kFlat <= 32, "a bit per register");
  u32 of[kKept];

  FA_DEVICE void keep_all() {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) of[kept] = ~0u;
  }
  FA_DEVICE bool keep(int kept, int r) const { return of[kept] >> r & 1u; }

  FA_DEVICE void draw_streamed_keys(const DropoutRule& rule, int b, int h, int first_query, int first_key) {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) of[kept] = 0;
    for_each_kept_byte<Engine, kKept, kStreamed>(rule, b, h, first_query, first_key,
                                                 [&](int kept, int r, bool keep) { of[kept] |= u32(keep) << r; });
  }
  // Queries are streamed. One call serves the keys of four lanes, in kTilesPerCall tiles: each of the lanes makes the
  // call for one of four queries, and they exchange words.
  FA_DEVICE void draw_kept_keys(const DropoutRule& rule, int b, int h, int first_query, int first_key) {
    constexpr int kTile = Engine::kTile, kTilesPerCall = kKept % 4 == 0 && kTile == 16 ? 4 : kKept % 2 == 0 ? 2 : 1;
    const int kept_lane = opaque(Engine::kept_of_lane()), byte = kept_lane % 4;
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) of[kept] = 0;
    FA_NO_UNROLL for (int i = 0; i < kFlat / Engine::kKeptPerLane; i += 4) {
      FA_UNROLL
      for (int slot = 0; slot < Engine::kKeptPerLane; ++slot) FA_UNROLL
      for (int kept = 0; kept < kKept; kept += kTilesPerCall) {
        const int own = Engine::streamed_of_register(Engine::register_of_slot(slot, i + byte));
        const int key = first_key + kept * kTile + Engine::kept_of_slot(slot) + kept_lane;
        const PhiloxWords words =
            rule.bytes(b, h, first_query + own + Engine::streamed_of_lane(), key / 64, key / 4 % 4);
        FA_UNROLL
        for (int tile = 0; tile < kTilesPerCall; ++tile) {
          const float word = bit_cast<float>(pick(words, (key + tile * kTile) / 16 % 4));
          FA_UNROLL
          for (int n = 0; n < 4; ++n) {
            const u32 theirs = bit_cast<u32>(from_lane(word, lane_index() + (n - byte) * Engine::kKeptLaneStride));
            of[kept + tile] |= u32(rule.keep(theirs >> (8 * byte) & 255u)) << Engine::register_of_slot(slot, i + n);
          }
        }
      }
    }
  }
};

// LSE (log2 units) and delta of a step's queries, on their way to LDS like the step's tiles, in two buffers.
template <int kRows>
class QueryStatistics {
 public:
  static constexpr int kBytes = 4 * kRows * int(sizeof(float));
  FA_DEVICE explicit QueryStatistics(char* lds) : lds_(reinterpret_cast<float*>(lds)) {}

  // Queries from `first` on; those past `count` see no key.
  FA_DEVICE void fetch(const float* lse, const float* delta, int first, int count) {
    const int row = min_of(thread_index(), kRows - 1) + first;
    const int inside = min_of(row, count - 1);
    lse_ = row < count ? lse_to_log2(lse[inside]) : kInf;
    delta_ = lse_ == kInf ? 0.0f : delta[inside];
  }
  FA_DEVICE void commit() {
    current_ = 1 - current_;
    if (thread_index() >= kRows) return;
    float* const to = lds_ + current_ * 2 * kRows + thread_index();
    to[0] = lse_;
    to[kRows] = delta_;
  }
  template <int kRun>
  FA_DEVICE Vec<float, kRun> lse(int row) const {
    return load<Vec<float, kRun>>(lds_ + current_ * 2 * kRows + row);
  }
  template <int kRun>
  FA_DEVICE Vec<float, kRun> delta(int row) const {
    return load<Vec<float, kRun>>(lds_ + current_ * 2 * kRows + kRows + row);
  }

 private:
  float* lds_;
  float lse_, delta_;
  int current_ = 0;
};

}  // namespace flash_attn::gpu
