// What a launch passes to a kernel: one plain struct by value, filled by csrc/hip/host. Shared by host and device.
//
// Values that live in GPU memory (cu_seqlens, rng_state) are read in the kernel and clamped there. Offsets of a (batch,
// head) are 64-bit.
#pragma once

#include "hip/page_size.h"

namespace flash_attn::gpu {

// A (rows, heads, features) tensor per batch element. Strides in elements; the feature stride is 1.
struct TensorArg {
  void* data;
  index_t batch_stride;  // 0 for packed (varlen) tensors
  index_t row_stride, head_stride;
};

// What forward and backward have in common.
struct AttentionArgs {
  TensorArg q, k, v;  // (B,Sq,H,D) (B,Sk,Hk,D) (B,Sk,Hk,Dv), or packed (Tq,H,D) (Tk,Hk,D) (Tk,Hk,Dv)
  std::int32_t B, H, Hk, D, Dv;
  std::int32_t Sq, Sk;               // Lengths; varlen: upper bounds of the sequence lengths.
  std::int32_t Tq, Tk;               // Rows of packed tensors.
  const std::int32_t* cu_seqlens_q;  // (B+1), or null: dense
  const std::int32_t* cu_seqlens_k;
  float scale_log2;                        // softmax_scale * log2(e); the plain variant needs it positive
  float softcap_log2;                      // softcap * log2(e), 0: none
  float inverse_softcap;                   // softmax_scale / softcap
  std::int32_t window_left, window_right;  // Negative: unbounded. Causal is window_right = 0.
  const float* alibi_slopes;               // (H) or (B,H), or null
  std::int32_t alibi_batch_stride;
  std::uint32_t keep_threshold;   // Dropout: kept iff byte <= threshold.
  const std::int64_t* rng_state;  // Seed and offset, or null: no dropout
  float keep_scale;               // 1 / (1 - p)
  // Every tensor is 16-byte aligned in base, strides and D * size, Dv * size, and 256 rows span less than 2^31 bytes.
  // The plain variant needs it.
  std::int32_t regular;
  std::int32_t tiles;  // Of the longest sequence: blocks per (batch, head).
};

// Where keys and values are stored, if not one sequence after another; null: not given. Only the cache variant asks.
struct KeyStorageArg {
  const std::int32_t* used;         // (B) slots in use, besides `appended` new ones
  const std::int32_t* leftpad;      // (B) slots before the first key
  const std::int32_t* batch_index;  // (B) batch elements of k and v
  const std::int32_t* pages;        // (B, pages_per_sequence): k and v are (batches, page.size, Hk, D or Dv)
  index_t pages_stride;
  PageSize page;
  std::int32_t pages_per_sequence;
  std::int32_t batches;  // Batch elements, or pages, of k and v.
  std::int32_t appended;
};

inline constexpr int kMostSplits = 128;

// Results of `count` ranges of the keys that a block's queries see, one after another. Only the cache variant asks.
struct SplitsArg {
  std::int32_t count;  // Up to kMostSplits. 1: out and lse are written, and the rest is not read.
  index_t rows;        // Of a range: what lse has elements.
  float* out;          // (count,rows,Dv), 16-byte aligned; undefined where lse is -inf
  float* lse;          // (count,rows), natural log, -inf for a row that sees no key of the range
};

// Grid: tiles * splits * H * B blocks, and with cu_seqlens tiles * splits * H more, which clear the rows outside of all
// sequences.
struct ForwardArgs {
  AttentionArgs attention;
  TensorArg out;  // (B,Sq,H,Dv) or (Tq,H,Dv)
  float* lse;     // (B,H,Sq) or (H,Tq), natural log, +inf for a row that sees no key
  KeyStorageArg keys;
  SplitsArg splits;
};

// Grid: waves_per_row waves for each row of lse, as many as Dv has parts of a wave's lanes.
struct CombineArgs {
  SplitsArg splits;
  TensorArg out;  // as ForwardArgs
  float* lse;
  std::int32_t heads, rows;  // Of a batch element: lse is (B,heads,rows).
  std::int32_t Dv, waves_per_row;
};

// Grid: tiles * B blocks, tiles = new_rows, and Sq more where queries are rotated.
struct AppendArgs {
  AttentionArgs attention;  // k and v are the caches. Dense.
  KeyStorageArg keys;
  TensorArg k_new, v_new;  // (B,new_rows,Hk,D) (B,new_rows,Hk,Dv)
  TensorArg rotated;       // (B,Sq,H,D), may be q
  const void *cos, *sin;   // dtype of q, (positions, half), or null with half = 0
  std::int32_t new_rows, positions, half;
  std::int32_t interleaved;
  std::int32_t position_per_row;  // Query row i stands i positions after the first one's, else all at that.
};

// Grid: tiles * H * B blocks. Writes every element.
struct ForwardDmaskArgs {
  AttentionArgs attention;  // v is not read.
  void* s_dmask;            // dtype of q, (B,H,Sq,Sk), as ForwardArgs::s_dmask of flash_attn/attention.h
};

// Grid: tiles * H * B blocks for backward_delta and backward_dq, tiles * Hk * B for the kernels of dK and dV, and with
// cu_seqlens tiles * H or Hk more. `tiles` counts the kernel's own blocks of queries or keys.
struct BackwardArgs {
  AttentionArgs attention;
  TensorArg dout, out;   // (B,Sq,H,Dv) or (Tq,H,Dv)
  TensorArg dq, dk, dv;  // as q, k, v
  const float* lse;      // as forward's; either infinity is a row that sees no key
  float* delta;          // rowsum(dout * out) - dlse, as lse: backward_delta writes it, the others read it
  const float* dlse;     // Gradient of lse, as lse, or null
};

}  // namespace flash_attn::gpu
