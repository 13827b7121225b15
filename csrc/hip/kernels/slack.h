// Rows of packed tensors that belong to no block of a kernel: outside of all sequences, and what a sequence has in
// excess of the promised longest length.
#pragma once

#include "hip/device/engine.h"
#include "hip/kernels/problem.h"

namespace flash_attn::gpu {

// f(row, thread, threads) for every such row of `rows` packed rows, called by `threads` threads together. `longest`
// rows of each sequence have a block. `parts` blocks share the rows; this one is `part`.
template <class F>
FA_DEVICE void for_each_slack_row(const std::int32_t* cu_seqlens, int B, int rows, int longest, int part, int parts,
                                  int kThreads, F f) {
  for (int row = part; row < clamp(cu_seqlens[0], 0, rows); row += parts) f(row, thread_index(), kThreads);
  for (int row = clamp(cu_seqlens[B], 0, rows) + part; row < rows; row += parts) f(row, thread_index(), kThreads);
  for (int b = part * kThreads + thread_index(); b < B; b += parts * kThreads) {
    const Span all = sequence_span(cu_seqlens, b, longest, rows);
    for (int row = all.begin + min_of(all.count, longest); row < clamp(cu_seqlens[b + 1], 0, rows); ++row) f(row, 0, 1);
  }
}

// Zeros in one row of a head.
template <class T>
FA_DEVICE void clear_row(const TensorArg& x, int row, int head, int features, int thread, int threads) {
  T* const p = static_cast<T*>(x.data) + row * x.row_stride + head * x.head_stride;
  for (int feature = thread; feature < features; feature += threads) p[feature] = narrow<T>(0.0f);
}

}  // namespace flash_attn::gpu
