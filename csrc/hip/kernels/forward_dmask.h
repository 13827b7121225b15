// S_dmask, which callers ask for to look at dropout: exp(score - row maximum), negative where dropout drops the weight,
// 0 where a key is masked or a row lies outside of its sequence. Straight from the definition, without tiles.
#pragma once

#include "hip/kernels/dropout.h"

namespace flash_attn::gpu {

// A wave writes a row at a time, a lane every kWave-th key.
template <class Plan>
class ForwardDmask {
  using T = typename Plan::Engine::Element;
  static constexpr int kRows = Plan::kBlockRows;

 public:
  static constexpr int kLdsBytes = 16;

  FA_DEVICE static void run(const ForwardDmaskArgs& args, char*) {
    const AttentionArgs& a = args.attention;
    const u32 block = block_index(), unit = block / u32(a.tiles);
    const int b = int(unit / u32(a.H)), h = int(unit % u32(a.H)), first = int(block % u32(a.tiles)) * kRows;
    const Span queries = query_span(a, b), keys = key_span(a, b);
    T* const out = static_cast<T*>(args.s_dmask) + (index_t(b) * a.H + h) * a.Sq * a.Sk;
    for (int row = first + wave_index(); row < min_of(first + kRows, a.Sq); row += Plan::kWaves)
      ForwardDmask(a, b, h, queries, keys).write(row, out + index_t(row) * a.Sk);
  }

 private:
  FA_DEVICE ForwardDmask(const AttentionArgs& a, int b, int h, Span queries, Span keys)
      : a_(a),
        b_(b),
        h_(h),
        queries_(queries),
        keys_{keys.begin, min_of(keys.count, a.Sk)},
        rule_(score_rule(a, b, h, queries.count, keys.count)),
        dropout_(dropout_rule(a)) {}

  FA_DEVICE void write(int row, T* out) const {
    Range seen = row < queries_.count ? rule_.visible_keys(row) : Range{0, 0};
    seen.end = min_of<index_t>(seen.end, keys_.count);
    float top = -kInf;
    for (int key = int(seen.begin) + lane_index(); key < seen.end; key += kWave) top = maximum(top, score(row, key));
    FA_UNROLL
    for (int distance = 1; distance < kWave; distance *= 2) top = maximum(top, from_lane(top, lane_index() ^ distance));
    for (int key = lane_index(); key < a_.Sk; key += kWave) {
      float p = 0;
      if (key >= seen.begin && key < seen.end) {
        p = exp2(score(row, key) - top);
        if (dropout_.active && !keep(row, key)) p = -p;
      }
      out[key] = narrow<T>(p);
    }
  }

  FA_DEVICE float score(int row, int key) const {
    const auto q = rows_of<T>(a_.q, b_, h_, queries_, row, a_.D, a_.regular);
    const auto k = rows_of<T>(a_.k, b_, h_ / (a_.H / a_.Hk), keys_, key, a_.D, a_.regular);
    float sum = 0;
    for (int feature = 0; feature < a_.D; feature += kUnitElements<T>)
      sum = add_products<T>(load_padded<true, 4>(q, 0, feature), load_padded<true, 4>(k, 0, feature), sum);
    return rule_.logit(Score(sum), Score(float(row + int(rule_.Sk - rule_.Sq) - key))).x;
  }

  FA_DEVICE bool keep(int row, int key) const {
    const PhiloxWords words = dropout_.bytes(b_, h_, row, key / 64, key / 4 % 4);
    return dropout_.keep(pick(words, key / 16 % 4) >> (8 * (key % 4)) & 255u);
  }

  const AttentionArgs& a_;
  int b_, h_;
  Span queries_, keys_;
  ScoreRule<float> rule_;
  DropoutRule dropout_;
};

}  // namespace flash_attn::gpu
