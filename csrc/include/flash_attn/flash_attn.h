/* FlashAttention, C interface (C11, and C++). What arguments mean, their shapes and dtypes: flash_attn/attention.h
 * and flash_attn/rotary.h, whose structs these mirror field by field; letters as there (B, H, Hk, Sq, Sk, D, Dv, ...).
 * All tensors are in host memory; GPUs are called from C++ (flash_attn/gpu.h).
 *
 *   flash_attn_problem problem;
 *   flash_attn_problem_init(&problem);         all fields at their defaults, struct_size set
 *   problem.q = ...;                           views of your memory; nothing is owned or kept by the library
 *   flash_attn_forward_args args;
 *   flash_attn_forward_args_init(&args);
 *   args.problem = &problem, args.out = ..., args.lse = ...;
 *   if (flash_attn_forward(&args, NULL) != FLASH_ATTN_OK) fprintf(stderr, "%s\n", flash_attn_last_error());
 *
 * Versions: a struct only ever grows at its end. A program compiled with an older header passes a smaller struct_size,
 * and what it lacks is at its default; one with a newer header is refused when it sets a field that this library does
 * not know. */
#ifndef FLASH_ATTN_H
#define FLASH_ATTN_H

#include <stddef.h>
#include <stdint.h>

#include "flash_attn/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  FLASH_ATTN_OK = 0,
  FLASH_ATTN_INVALID = 1,       /* malformed arguments: nothing was written */
  FLASH_ATTN_NOT_SUPPORTED = 2, /* well-formed, and no backend of this build computes it: nothing was written */
  FLASH_ATTN_FAILED = 3,        /* out of memory */
  FLASH_ATTN_VERSION = 4        /* a struct_size that this library does not know */
} flash_attn_status;

typedef enum {
  FLASH_ATTN_F16 = 0,
  FLASH_ATTN_BF16 = 1,
  FLASH_ATTN_F32 = 2,
  FLASH_ATTN_F64 = 3,
  FLASH_ATTN_I32 = 4,
  FLASH_ATTN_I64 = 5,
  FLASH_ATTN_BOOL = 6 /* one byte, nonzero is true */
} flash_attn_dtype;

/* Strided view of the caller's memory, strides in elements. ndim = 0: not given. */
typedef struct {
  void* data;
  int32_t dtype; /* flash_attn_dtype */
  int32_t ndim;
  int64_t sizes[4];
  int64_t strides[4];
} flash_attn_tensor;

/* attention.h: AttentionProblem */
typedef struct {
  size_t struct_size;
  flash_attn_tensor q, k, v;
  flash_attn_tensor cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  double softmax_scale; /* default 1 */
  double softcap;
  int32_t causal;
  int32_t reserved;
  int64_t window_left, window_right; /* default -1: unbounded */
  flash_attn_tensor alibi_slopes;
  double dropout_p;
  flash_attn_tensor rng_state;
  flash_attn_tensor attn_bias, attn_mask, key_begin, key_end;
  flash_attn_tensor block_table, cache_batch_idx, seqused_k, leftpad_k;
  int64_t num_splits;
  flash_attn_tensor learnable_sink;
} flash_attn_problem;

/* attention.h: ForwardArgs */
typedef struct {
  size_t struct_size;
  const flash_attn_problem* problem;
  flash_attn_tensor out, lse, s_dmask;
} flash_attn_forward_args;

/* attention.h: BackwardArgs */
typedef struct {
  size_t struct_size;
  const flash_attn_problem* problem;
  flash_attn_tensor dout, out, lse;
  flash_attn_tensor dq, dk, dv, softmax_d;
  flash_attn_tensor dlse, dbias, dsink;
} flash_attn_backward_args;

/* attention.h: CacheArgs */
typedef struct {
  size_t struct_size;
  const flash_attn_problem* problem;
  flash_attn_tensor k_new, v_new, rotary_cos, rotary_sin;
  int32_t rotary_interleaved; /* default 1 */
  int32_t reserved;
  flash_attn_tensor out, lse;
} flash_attn_cache_args;

/* rotary.h: RotaryArgs */
typedef struct {
  size_t struct_size;
  flash_attn_tensor x, cos, sin, out; /* out may be x */
  int64_t offset;
  flash_attn_tensor offsets, cu_seqlens;
  int64_t max_seqlen;
  int32_t interleaved, conjugate;
} flash_attn_rotary_args;

/* The caller's threads. `run` calls body(arg, worker) for worker = 0, and for as many of 1 .. n-1 as it has threads
 * for, each once and possibly at once, and returns when these calls have. Results do not depend on how many there were.
 */
typedef struct {
  size_t struct_size;
  int32_t num_threads;
  int32_t reserved;
  void (*run)(void* context, int n, void (*body)(void* arg, int worker), void* arg);
  void* context;
} flash_attn_executor;

/* Writes defaults into the struct_size bytes that the caller has for a struct, and that number itself. From C and C++
 * call flash_attn/init.h's flash_attn_problem_init(&problem) and so on, which know it. */
FLASH_ATTN_API void flash_attn_default_problem(flash_attn_problem* problem, size_t struct_size);
FLASH_ATTN_API void flash_attn_default_forward_args(flash_attn_forward_args* args, size_t struct_size);
FLASH_ATTN_API void flash_attn_default_backward_args(flash_attn_backward_args* args, size_t struct_size);
FLASH_ATTN_API void flash_attn_default_cache_args(flash_attn_cache_args* args, size_t struct_size);
FLASH_ATTN_API void flash_attn_default_rotary_args(flash_attn_rotary_args* args, size_t struct_size);

/* executor: NULL is the library's own pool with one thread per processor. */
FLASH_ATTN_API flash_attn_status flash_attn_forward(const flash_attn_forward_args* args,
                                                    const flash_attn_executor* executor);
FLASH_ATTN_API flash_attn_status flash_attn_backward(const flash_attn_backward_args* args,
                                                     const flash_attn_executor* executor);
FLASH_ATTN_API flash_attn_status flash_attn_with_cache(const flash_attn_cache_args* args,
                                                       const flash_attn_executor* executor);
FLASH_ATTN_API flash_attn_status flash_attn_rotary(const flash_attn_rotary_args* args,
                                                   const flash_attn_executor* executor);

/* What the last call on this thread that did not return FLASH_ATTN_OK has to say; "" if there was none. Valid until the
 * next call. */
FLASH_ATTN_API const char* flash_attn_last_error(void);
/* "major.minor.patch" of this library. */
FLASH_ATTN_API const char* flash_attn_version(void);

#ifdef __cplusplus
}
#endif

#include "flash_attn/init.h"

#endif
