// From kernel arguments to one sequence and head: where it lies, how long it is, and its score and dropout rules.
#pragma once

#include "core/dropout.h"
#include "core/score.h"
#include "hip/device/rows.h"
#include "hip/kernels/args.h"

namespace flash_attn::gpu {

// Rows [begin, begin + count) of the batch element's tensor.
struct Span {
  int begin, count;
};

FA_DEVICE int clamp(int x, int low, int high) { return max_of(low, min_of(x, high)); }

FA_DEVICE Span sequence_span(const std::int32_t* cu_seqlens, int b, int dense_length, int packed_rows) {
  if (!cu_seqlens) return {0, dense_length};
  const int begin = clamp(cu_seqlens[b], 0, packed_rows);
  return {begin, clamp(cu_seqlens[b + 1], begin, packed_rows) - begin};
}
// No more queries than the launch has blocks for.
FA_DEVICE Span query_span(const AttentionArgs& a, int b) {
  const Span all = sequence_span(a.cu_seqlens_q, b, a.Sq, a.Tq);
  return {all.begin, min_of(all.count, a.Sq)};
}
FA_DEVICE Span key_span(const AttentionArgs& a, int b) { return sequence_span(a.cu_seqlens_k, b, a.Sk, a.Tk); }

// The head's rows of a sequence, from its row `first` on.
template <class T>
FA_DEVICE Rows<T> rows_of(const TensorArg& x, int b, int head, Span span, int first, int features, bool regular) {
  const index_t offset = b * x.batch_stride + head * x.head_stride + index_t(span.begin + first) * x.row_stride;
  return {static_cast<const T*>(x.data) + offset, x.row_stride, span.count - first, features, regular};
}

// Offset of the sequence's first row in an LSE-shaped array: (B,H,Sq), or (H,Tq) when packed.
FA_DEVICE index_t lse_offset(const AttentionArgs& a, int b, int h, Span queries) {
  return a.cu_seqlens_q ? index_t(h) * a.Tq + queries.begin : (index_t(b) * a.H + h) * a.Sq;
}

FA_DEVICE float alibi_slope_log2(const AttentionArgs& a, int b, int h) {
  return a.alibi_slopes[index_t(b) * a.alibi_batch_stride + h] * float(kLog2e);
}

FA_DEVICE ScoreRule<float> score_rule(const AttentionArgs& a, int b, int h, int Sq, int Sk) {
  ScoreRule<float> rule;
  rule.scale_log2 = a.scale_log2;
  rule.softcap_log2 = a.softcap_log2;
  rule.inverse_softcap = a.inverse_softcap;
  rule.slope_log2 = a.alibi_slopes ? alibi_slope_log2(a, b, h) : 0.0f;
  rule.Sq = Sq;
  rule.Sk = Sk;
  rule.window_left = a.window_left;
  rule.window_right = a.window_right;
  return rule;
}

FA_DEVICE DropoutRule dropout_rule(const AttentionArgs& a) {
  DropoutRule rule;
  if (!a.rng_state) return rule;
  const auto seed = std::uint64_t(a.rng_state[0]), offset = std::uint64_t(a.rng_state[1]);
  const PhiloxWords words = philox4x32({{u32(offset), u32(offset >> 32), 0, 0}}, {u32(seed), u32(seed >> 32)});
  rule.subkey = {words.w[0], words.w[1]};
  rule.keep_threshold = a.keep_threshold;
  rule.active = true;
  return rule;
}

// The number type of core/score.h's hooks on a GPU lane.
struct Score {
  float x;
  FA_DEVICE explicit Score(float value) : x(value) {}
  FA_DEVICE friend Score operator+(Score a, Score b) { return Score(a.x + b.x); }
  FA_DEVICE friend Score operator-(Score a, Score b) { return Score(a.x - b.x); }
  FA_DEVICE friend Score operator*(Score a, Score b) { return Score(a.x * b.x); }
  FA_DEVICE friend Score vabs(Score a) { return Score(__builtin_fabsf(a.x)); }
  FA_DEVICE friend Score vtanh(Score a) { return Score(tanh(a.x)); }
};

}  // namespace flash_attn::gpu
