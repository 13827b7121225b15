// Backward pass, preprocessing: delta = rowsum(dO * out) - dLSE in fp32, which is also what callers know as softmax_d.
#pragma once

#include "hip/kernels/slack.h"

namespace flash_attn::gpu {

// 8 lanes read a row together.
template <class Plan>
class BackwardDelta {
  using T = typename Plan::Engine::Element;
  static constexpr int kLanes = 8, kRows = Plan::kBlockRows;
  static constexpr int kUnit = kUnitElements<T>;

 public:
  static constexpr int kLdsBytes = 16;

  FA_DEVICE static void run(const BackwardArgs& args, char*) {
    const AttentionArgs& a = args.attention;
    const u32 block = block_index(), unit = block / u32(a.tiles);
    const int b = int(unit / u32(a.H)), h = int(unit % u32(a.H)), tile = int(block % u32(a.tiles));
    if (b == a.B)
      return for_each_slack_row(a.cu_seqlens_q, a.B, a.Tq, a.Sq, tile, a.tiles, Plan::kThreads,
                                [&](int row, int thread, int) {
                                  if (thread == 0) args.delta[index_t(h) * a.Tq + row] = 0;
                                });
    const Span queries = query_span(a, b);
    const int first = tile * kRows;
    if (first >= queries.count) return;
    const auto dout = rows_of<T>(args.dout, b, h, queries, first, a.Dv, a.regular);
    const auto out = rows_of<T>(args.out, b, h, queries, first, a.Dv, a.regular);
    const index_t at = lse_offset(a, b, h, queries) + first;
    for (int row = thread_index() / kLanes; row < kRows; row += Plan::kThreads / kLanes) {
      float sum = dot(dout, out, row);
      FA_UNROLL
      for (int distance = 1; distance < kLanes; distance *= 2) sum += from_lane(sum, lane_index() ^ distance);
      if (row >= dout.count || thread_index() % kLanes != 0) continue;
      if (args.dlse && __builtin_fabsf(args.lse[at + row]) != kInf) sum -= args.dlse[at + row];
      args.delta[at + row] = sum;
    }
  }

 private:
  // This lane's part; rows past the end give the last row's.
  FA_DEVICE static float dot(const Rows<T>& x, const Rows<T>& y, int row) {
    float sum = 0;
    for (int feature = thread_index() % kLanes * kUnit; feature < x.features; feature += kLanes * kUnit)
      sum = add_products<T>(load_padded<true, 4>(x, row, feature), load_padded<true, 4>(y, row, feature), sum);
    return sum;
  }
};

}  // namespace flash_attn::gpu
