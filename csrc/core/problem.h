// A valid attention problem, as backends receive it: normalised, every extent known, nothing left to check.
#pragma once

#include "core/dropout.h"
#include "core/platform.h"
#include "core/score.h"
#include "flash_attn/attention.h"

namespace flash_attn {

// A (rows, heads, features) tensor seen per batch element. Strides in elements; the feature stride is 1.
struct Operand {
  void* data = nullptr;
  index_t batch_stride = 0;  // 0 for packed (varlen) tensors
  index_t row_stride = 0;
  index_t head_stride = 0;
};

// A table over (batch element, head, query, key); broadcast dimensions have stride 0. Queries and keys count from the
// beginning of their sequence.
struct ScoreTable {
  void* data = nullptr;
  DType dtype = DType::f32;
  index_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;

  FA_INLINE bool given() const { return data != nullptr; }
};

// int32 bounds of the keys per query row; broadcast dimensions have stride 0.
struct BoundTable {
  const std::int32_t* data = nullptr;
  index_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

// Where keys and values are stored, if not one sequence after another. Null: not given.
struct KeyStorage {
  const std::int32_t* used = nullptr;         // (B) slots in use, besides `appended` new ones
  const std::int32_t* leftpad = nullptr;      // (B) slots before the first key
  const std::int32_t* batch_index = nullptr;  // (B)
  const std::int32_t* pages = nullptr;        // (B, max_pages)
  index_t pages_stride = 0, page_size = 0;
  index_t pages_per_sequence = 0;
  index_t batches = 0;  // Batch elements of the caches, or their pages.
  index_t appended = 0;
};

// Keys whose rows lie row_stride apart.
struct KeyRun {
  index_t batch, row, count;
};

// Where sequence b lies in packed tensors, and how long it is. Dense: begins are 0.
struct Sequence {
  index_t q_begin, q_len;
  index_t k_begin, k_len;
};

struct Problem {
  DType dtype = DType::f32;
  Device device = Device::cpu;
  index_t B = 0, H = 0, Hk = 0, D = 0, Dv = 0;
  index_t Sq = 0, Sk = 0;  // Varlen: the longest sequence's.
  index_t Tq = 0, Tk = 0;  // Rows of the packed tensors (dense: B * Sq, B * Sk).
  bool varlen = false;
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* cu_seqlens_k = nullptr;

  Operand q, k, v;
  double scale = 1.0, softcap = 0.0;
  index_t window_left = -1, window_right = -1;  // Causal is folded in.
  const float* alibi_slopes = nullptr;
  index_t alibi_batch_stride = 0;
  DropoutRule dropout;                      // On a GPU without the subkey: rng_state is in its memory.
  const std::int64_t* rng_state = nullptr;  // Seed and offset; null without dropout.
  ScoreTable bias, mask;
  BoundTable key_begin, key_end;  // Packed: rows of all sequences, batch_stride 0.
  const void* sink = nullptr;     // (H), contiguous
  DType sink_dtype = DType::f32;
  KeyStorage storage;
  int num_splits = 0;

  FA_INLINE index_t group() const { return H / Hk; }

  FA_INLINE Sequence sequence(index_t b) const {
    Sequence s{0, Sq, 0, Sk};
    if (varlen)
      s = {cu_seqlens_q[b], cu_seqlens_q[b + 1] - cu_seqlens_q[b], cu_seqlens_k[b],
           cu_seqlens_k[b + 1] - cu_seqlens_k[b]};
    if (storage.pages) s.k_begin = 0;
    if (storage.used) s.k_len = storage.used[b] + storage.appended;
    if (storage.leftpad) {
      s.k_begin += storage.leftpad[b];
      s.k_len = max_of<index_t>(0, s.k_len - storage.leftpad[b]);
    }
    return s;
  }

  // Where slot number `slot` of sequence b and those after it are, as far as they lie evenly. Packed rows: slot counts
  // from the first sequence's.
  FA_INLINE KeyRun slots(index_t b, index_t slot) const {
    // A run longer than any sequence: callers stop at its last key.
    if (!storage.pages) return {storage.batch_index ? storage.batch_index[b] : b, slot, max_of(Sk, Tk)};
    const index_t row = slot % storage.page_size;
    return {storage.pages[b * storage.pages_stride + slot / storage.page_size], row, storage.page_size - row};
  }
  // The same for key j of a sequence.
  FA_INLINE KeyRun keys_from(const Sequence& s, index_t b, index_t j) const { return slots(b, s.k_begin + j); }
  // Calls work(run, n) for each run that some of `keys` of a sequence are in, with as many keys as are asked for; n is
  // the first. Pages follow each other, so that they cost no division each.
  template <class Work>
  FA_INLINE void each_run(const Sequence& s, index_t b, Range keys, const Work& work) const {
    if (keys.empty()) return;
    KeyRun run = keys_from(s, b, keys.begin);
    const std::int32_t* page = storage.pages;
    if (page) page += b * storage.pages_stride + (s.k_begin + keys.begin) / storage.page_size;
    for (index_t n = keys.begin;;) {
      run.count = min_of(run.count, keys.end - n);
      work(run, n);
      n += run.count;
      if (n == keys.end) return;
      run = {*++page, 0, storage.page_size};
    }
  }

  // Offset of row 0 of (b, h) in an LSE-shaped array: (B,H,Sq), or (H,Tq) when packed.
  FA_INLINE index_t lse_offset(index_t b, index_t h) const {
    return varlen ? h * Tq + cu_seqlens_q[b] : (b * H + h) * Sq;
  }

  template <class Real>
  FA_INLINE ScoreRule<Real> score_rule(index_t b, index_t h) const {
    const Sequence s = sequence(b);
    ScoreRule<Real> rule{};
    rule.scale_log2 = Real(scale * kLog2e);
    rule.softcap_log2 = Real(softcap * kLog2e);
    rule.inverse_softcap = softcap > 0 ? Real(scale / softcap) : Real(0);
    rule.slope_log2 = alibi_slopes ? Real(alibi_slopes[b * alibi_batch_stride + h] * kLog2e) : Real(0);
    rule.Sq = s.q_len;
    rule.Sk = s.k_len;
    rule.window_left = window_left;
    rule.window_right = window_right;
    if (key_begin.data)
      rule.bounds.begin = bound_row(key_begin, b, h, s), rule.bounds.begin_stride = key_begin.row_stride;
    if (key_end.data) rule.bounds.end = bound_row(key_end, b, h, s), rule.bounds.end_stride = key_end.row_stride;
    if (mask.given())
      rule.mask = {static_cast<const std::uint8_t*>(mask.data) + b * mask.batch_stride + h * mask.head_stride,
                   mask.row_stride, mask.key_stride};
    return rule;
  }

 private:
  FA_INLINE static const std::int32_t* bound_row(const BoundTable& t, index_t b, index_t h, const Sequence& s) {
    return t.data + b * t.batch_stride + h * t.head_stride + s.q_begin * t.row_stride;
  }
};

struct ForwardProblem {
  Problem problem;
  Operand out;
  void* lse = nullptr;      // fp32, or fp64 when dtype is
  void* s_dmask = nullptr;  // dtype, (B,H,Sq,Sk) contiguous, or null
};

// (positions, half) numbers, rows `stride` apart.
struct RotaryTable {
  const void* data = nullptr;
  DType dtype = DType::f32;
  index_t stride = 0;
};

// Rotation of the first 2 * half features.
struct Rotary {
  RotaryTable cos, sin;
  index_t positions = 0, half = 0;
  bool given = false;
  bool interleaved = true, conjugate = false;
};

struct CacheProblem {
  ForwardProblem forward;  // Of the caches, the new keys counted.
  Operand k_new, v_new;
  Rotary rotary;
  bool position_per_row = false;  // Query row i stands at used[b] + i, else all rows at used[b].
};

struct BackwardProblem {
  Problem problem;
  Operand dout, out, dq, dk, dv;
  const void* lse = nullptr;
  const void* dlse = nullptr;  // As lse; null: the loss does not use it.
  void* softmax_d = nullptr;
  ScoreTable dbias;       // Where the bias is broadcast, so is this; null data: not wanted.
  void* dsink = nullptr;  // (H), dtype of the sink; null: not wanted.
};

}  // namespace flash_attn
