// Rotary position embedding (Su et al. 2021, "RoFormer", https://arxiv.org/abs/2104.09864), C++ interface.
//
// Letters as in flash_attn/attention.h; S rows of a sequence, T rows of a packed batch, R <= D features that turn, P
// rows of the tables.
#pragma once

#include "flash_attn/attention.h"

namespace flash_attn {

/// A pair (a, b) of features of the row at position p becomes (a c - b s, a s + b c), with c and s the pair's entries
/// in row p of cos and sin, in fp32 (fp64 for fp64), and is then rounded to the dtype of x.
///
/// Row i of sequence b is at position i + offset + offsets[b]. A position without a row in the tables, which only
/// `offsets` can ask for, is not rotated; nor are rows behind the last sequence.
struct RotaryArgs {
  TensorView x;         ///< (B,S,H,D), or (T,H,D) with cu_seqlens; fp16, bf16, fp32 or fp64, last stride 1.
  TensorView cos, sin;  ///< (P,R/2), any floating dtype, last stride 1; P >= offset + S or max_seqlen.
  TensorView out;  ///< dtype and shape of x, last stride 1. Every element is written: features from R on are copied.
                   ///< May be x itself, with its strides, and must not overlap it otherwise.
  std::int64_t offset = 0;      ///< At least 0.
  TensorView offsets;           ///< Optional int32 or int64 (B), contiguous, any values.
  TensorView cu_seqlens;        ///< int32 or int64 (B+1), contiguous, from 0, not decreasing, up to at most T.
  std::int64_t max_seqlen = 0;  ///< With cu_seqlens: at least the longest sequence's length.
  bool interleaved = false;     ///< Pairs are features (0,1), (2,3), ..., else (i, i + R/2).
  bool conjugate = false;       ///< Rotate the other way, which is the derivative.
};

/// CPU tensors only. Throws Error before anything is written. B, S, T and H may be 0.
FLASH_ATTN_API void apply_rotary(const RotaryArgs& args, const Executor& executor);

}  // namespace flash_attn
