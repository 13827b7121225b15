// FlashAttention core, C++ interface. No torch, Python or GPU headers here.
//
// Letters, used throughout: B batch, H query heads, Hk key/value heads (H % Hk == 0), Sq / Sk query / key length,
// D head dim of queries and keys, Dv head dim of values, Tq / Tk tokens of a packed (varlen) batch.
//
// The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): tiled online softmax forward,
// recomputation from the saved log-sum-exp (LSE) backward. Memory beyond inputs and outputs is O(Sq + Sk) per head.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "flash_attn/export.h"

namespace flash_attn {

/// The project's own version; the Python distribution's version is upstream's (2.8.3) and lives elsewhere.
inline constexpr const char* kVersion = "0.1.0";

/// Largest supported D and Dv.
inline constexpr std::int64_t kMaxHeadDim = 576;

enum class DType : std::uint8_t { f16, bf16, f32, f64, i32, i64, boolean };
enum class Device : std::uint8_t { cpu, gpu };

FLASH_ATTN_API const char* to_string(DType dtype) noexcept;
FLASH_ATTN_API std::int64_t size_of(DType dtype) noexcept;

/// A problem that cannot be computed. The text names the argument, what was passed and what is accepted.
class FLASH_ATTN_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A well-formed problem that no backend of this build computes.
class FLASH_ATTN_API NotSupported : public Error {
 public:
  using Error::Error;
};

/// Strided view of memory that somebody else owns. Strides are in elements. `data == nullptr` with `ndim == 0` is "not
/// given".
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device = Device::cpu;
  int ndim = 0;
  std::array<std::int64_t, 4> sizes{};
  std::array<std::int64_t, 4> strides{};

  bool given() const noexcept { return ndim > 0; }
};

/// What is asked for, shared by forward and backward.
///
/// Dense: q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv).
/// Varlen (both cu_seqlens given): q (Tq,H,D), k (Tk,Hk,D), v (Tk,Hk,Dv); sequence b is rows cu_seqlens[b] ..
/// cu_seqlens[b+1]-1. The last stride of every floating-point tensor is 1; the others are free.
struct AttentionProblem {
  TensorView q, k, v;                     ///< fp16, bf16, fp32 or fp64 (fp64 on the CPU only), all the same.
  TensorView cu_seqlens_q, cu_seqlens_k;  ///< int32 (B+1), contiguous, starting at 0, not decreasing. Both or neither.
                                          ///< In GPU memory they are not checked but clamped to the tensors.
  std::int64_t max_seqlen_q = 0;          ///< Varlen only: an upper bound of the sequence lengths, below 2^31.
  std::int64_t max_seqlen_k = 0;
  double softmax_scale = 1.0;  ///< Score = scale * q.k
  double softcap = 0.0;  ///< > 0: score = softcap * tanh(score / softcap), before ALiBi and mask. Not with dropout.
  bool causal = false;   ///< Query i sees key j iff j <= i + Sk - Sq.
  std::int64_t window_left = -1;  ///< Query i sees [i + Sk - Sq - left, i + Sk - Sq + right]; negative is unbounded,
                                  ///< and as in FlashAttention-2 so is a side of at least Sk, in varlen max_seqlen_k.
  std::int64_t window_right = -1;
  TensorView alibi_slopes;  ///< fp32 (H) or (B,H): adds -slope * |i + Sk - Sq - j|.
  double dropout_p =
      0.0;  ///< In [0, 1). An element is kept iff its Philox byte <= floor(255 * (1 - p)); see core/dropout.h.
  TensorView rng_state;  ///< int64 (2): Philox seed and offset. Required when dropout_p > 0.

  // In the tables below varlen's Sq and Sk are max_seqlen_q and max_seqlen_k, and rows and keys count from the
  // beginning of each sequence, keys from the first one after leftpad_k. A dimension of size 1 holds for all.
  TensorView attn_bias;  ///< dtype of q or fp32, (B|1,H|1,Sq|1,Sk), last stride 1: added to the score after softcap, as
                         ///< ALiBi is. -inf masks.
  TensorView attn_mask;  ///< boolean (one byte, nonzero keeps): (B,Sk), (B,Sq,Sk) or (B,H,Sq,Sk), each dimension or 1.
  TensorView key_begin;  ///< int32 (B|1,Sq) or (B|1,H|1,Sq), varlen (Tq) or (H|1,Tq): the row sees no key before it.
  TensorView key_end;    ///< Likewise: the row sees no key from it on. Any number is accepted.
  // Where keys are stored, forward only. Slots of sequence b are its rows of k and v, in the order of its pages.
  TensorView block_table;  ///< int32 (B,max_pages), last stride 1: k (num_pages,page,Hk,D), v (num_pages,page,Hk,Dv),
                           ///< and page n of sequence b is block_table[b][n]. Dense: Sk = max_pages * page.
  TensorView cache_batch_idx;  ///< int32 (B), contiguous, dense: the batch element of k and v that sequence b reads.
  TensorView seqused_k;        ///< int32 (B), contiguous: slots of sequence b that hold keys.
  TensorView leftpad_k;        ///< int32 (B), contiguous: slots before the first key; Sk of b is seqused_k - leftpad_k.
  std::int64_t num_splits = 0;  ///< 0 to 128: in how many ranges keys may be taken, 0 if the backend is to choose.

  TensorView learnable_sink;  ///< dtype of q or fp32, (H), contiguous: one more logit, whose value is zero.
};

/// Every element of the outputs is written, whatever they held.
struct ForwardArgs {
  AttentionProblem problem;
  TensorView
      out;  ///< dtype of q; (B,Sq,H,Dv) or (Tq,H,Dv). Rows that see no key and rows past the last sequence are 0.
  TensorView lse;  ///< Natural log, contiguous; fp32 (fp64 if q is): (B,H,Sq) or (H,Tq). +inf for a row that sees no
                   ///< key; with a sink every row has it.
  TensorView s_dmask;  ///< Optional, dtype of q, contiguous (B,H,Sq,Sk) or (B,H,max_seqlen_q,max_seqlen_k): exp(score -
                       ///< row maximum, the sink among it), negative where dropout drops the element, 0 where the mask
                       ///< hides it. Needs dropout_p > 0.
};

struct BackwardArgs {
  AttentionProblem problem;
  TensorView dout, out, lse;  ///< LSE as written by forward or merged from several; either infinity marks an empty row.
  TensorView dq, dk, dv;  ///< dtype and shape of q, k, v; any strides with last stride 1. Overwritten, not accumulated.
  TensorView softmax_d;   ///< rowsum(dout * out) - dlse; dtype, shape and layout of lse.
  TensorView dlse;        ///< Optional gradient of lse: dtype, shape and layout of lse. Ignored where lse is infinite.
  TensorView dbias;       ///< Optional: dtype and shape of attn_bias, last stride 1. Summed where that is broadcast.
  TensorView dsink;       ///< Optional: dtype and shape of learnable_sink, contiguous.
};

/// Attention over a cache that new keys and values are appended to first. Dense q. Of `problem`, k and v are the caches
/// and seqused_k holds the lengths before appending; the new keys count as the last ones.
struct CacheArgs {
  AttentionProblem problem;
  TensorView k_new, v_new;            ///< (B,Snew,Hk,D), (B,Snew,Hk,Dv), or neither. Need seqused_k. Written to slots
                                      ///< seqused_k[b] .. seqused_k[b]+Snew-1; of equal slots the last b wins on the
                                      ///< CPU, any b on a GPU, for k and v apart.
  TensorView rotary_cos, rotary_sin;  ///< dtype of q, (positions,R/2), contiguous, with k_new: rotates the first R
                                      ///< features of q and k_new. A key's position is its slot; query row i is at
                                      ///< seqused_k[b] + i, without causal and window all rows at seqused_k[b].
  bool rotary_interleaved = true;     ///< Pairs of features (0,1), (2,3), ..., else (i, i + R/2).
  TensorView out, lse;                ///< As in ForwardArgs.
};

class GpuRuntime;  // flash_attn/gpu.h

/// Where kernels of a GPU call are launched. The call returns when they are, not when they have run.
struct GpuQueue {
  GpuRuntime* runtime = nullptr;
  int device = 0;
  void* stream = nullptr;  ///< hipStream_t or CUstream; null is the default stream
  /// Lends GPU memory for what the call's kernels pass on to each other: 16-byte aligned, until they have run. Called
  /// at most twice by a call, before anything is launched. Null: calls that could use some take their keys in one
  /// range, and those that must have it throw NotSupported.
  void* (*scratch)(void* context, std::int64_t bytes) = nullptr;
  void* scratch_context = nullptr;
};

/// Host threads, and the queue of a GPU call. `run` calls body(arg, worker) for worker = 0 and for as many of 1 .. n-1
/// as it has threads for, each once and possibly at once, and returns when these calls have. Results never depend on
/// how many there were, provided that all of them round alike and treat subnormals alike (x86's MXCSR).
struct Executor {
  int num_threads = 1;
  void (*run)(void* context, int n, void (*body)(void* arg, int worker), void* arg) = nullptr;
  void* context = nullptr;
  GpuQueue gpu;
  bool waits_awake = false;  ///< Its threads begin at once, as OpenMP's do, which spin for a while between calls.
};

/// The library's own pool with that many threads (0: one per hardware thread). Safe after fork.
FLASH_ATTN_API Executor default_executor(int num_threads = 0);

/// Throws Error before any memory is touched. A call with B = 0 is an error, Sq = 0, Sk = 0, Tq = 0 or Tk = 0 is not.
FLASH_ATTN_API void attention_forward(const ForwardArgs& args, const Executor& executor);
FLASH_ATTN_API void attention_with_cache(const CacheArgs& args, const Executor& executor);
FLASH_ATTN_API void attention_backward(const BackwardArgs& args, const Executor& executor);

/// Throws the Error that a forward pass would for these tensors and numbers. For a caller who draws a seed only for
/// calls that will be computed: rng_state may be missing. Whether a kernel takes the problem is what explain() tells.
FLASH_ATTN_API void check_problem(const AttentionProblem& problem);

/// What calls on the CPU check of cu_seqlens_q (`queries`) or cu_seqlens_k and calls on a GPU, which do not wait to
/// read them, leave out: `cu_seqlens` in host memory, of a packed tensor with that many rows.
FLASH_ATTN_API void check_sequence_lengths(const TensorView& cu_seqlens, bool queries, std::int64_t rows,
                                           std::int64_t max_seqlen);

/// Which backend and kernel a call would use, and why.
struct Explanation {
  std::string backend;          ///< "cpu" or "gpu"
  std::string kernel;           ///< such as "cpu.forward.bfloat16.avx512_bf16" or "fa_forward_bf16_d128_plain"
  std::string instruction_set;  ///< such as "avx512_bf16" or "gfx942"
  std::string tile;             ///< such as "4 queries x 64 keys, key blocks of 512"
  std::vector<std::string> reasons;
};
/// What is computed; forward by the kernels that write S_dmask, too, where that is asked for.
enum class Pass : std::uint8_t { forward, backward, forward_and_s_dmask };
/// A problem on a GPU needs the executor's queue: kernels differ between targets.
FLASH_ATTN_API Explanation explain(const AttentionProblem& problem, Pass pass, const Executor& executor = {});
/// Of attention_with_cache; out and lse need not be set.
FLASH_ATTN_API Explanation explain(const CacheArgs& args, const Executor& executor = {});

/// Names of the CPU instruction sets that this build has and this machine can execute, best first.
FLASH_ATTN_API std::vector<std::string> cpu_instruction_sets();
/// Debug switch: use that instruction set from now on ("" returns to the best). Also read once from the environment
/// variable FLASH_ATTN_CPU_ISA. Changes speed and rounding, never what a call means. Throws Error for an unknown name.
FLASH_ATTN_API void force_cpu_instruction_set(const std::string& name);
/// The most scratch memory that the CPU backend has held at once since the last call of this, in bytes, in all threads.
FLASH_ATTN_API std::int64_t cpu_workspace_peak();

}  // namespace flash_attn
