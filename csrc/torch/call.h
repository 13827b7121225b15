// One attention call on torch tensors: what the operators, the autograd formula and the pybind11 module share, and the
// only part of the binding that calls the core.
//
// Letters are those of flash_attn/attention.h: B, H, Hk, Sq, Sk, D, Dv, Tq, Tk.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <flash_attn/attention.h>

#include <tuple>
#include <vector>

namespace flash_attn::torch_binding {

/// Arguments of one call as torch holds them. An undefined tensor is an argument that was not given.
/// Shapes, dtypes and meanings are those of flash_attn::AttentionProblem.
struct Call {
  at::Tensor q, k, v;
  at::Tensor cu_seqlens_q, cu_seqlens_k;
  at::Tensor alibi_slopes, rng_state;
  at::Tensor block_table, seqused_k, leftpad_k, cache_batch_idx;
  at::Tensor attn_bias, attn_mask, key_begin, key_end, learnable_sink;
  c10::SymInt max_seqlen_q = 0, max_seqlen_k = 0;
  c10::SymInt window_left = -1, window_right = -1;
  std::int64_t num_splits = 0;
  double dropout_p = 0.0, softmax_scale = 1.0, softcap = 0.0;
  bool causal = false;
  bool return_softmax = false;

  bool varlen() const { return cu_seqlens_q.defined() || cu_seqlens_k.defined(); }
};

/// The tensors that autograd sees: {q, k, v}, {q, kv} or {qkv}. A packed one has its 2 or 3 parts along dimension -3.
using Inputs = std::vector<at::Tensor>;
enum class Packing : std::int64_t { none = 0, kv = 1, qkv = 2 };
inline Packing packing_of(at::TensorList inputs) { return static_cast<Packing>(3 - inputs.size()); }

/// q, k and v: `inputs` themselves or views of their parts.
std::tuple<at::Tensor, at::Tensor, at::Tensor> unpack(at::TensorList inputs, bool varlen);

struct ForwardResult {
  at::Tensor out, softmax_lse, s_dmask;
};

/// What the backward pass needs of the forward one, beside its arguments.
struct Saved {
  at::Tensor dout, out, softmax_lse;
  at::Tensor dlse;  // Undefined where the loss does not use softmax_lse.
};

/// dbias and dsink are computed where they are defined.
struct Gradients {
  at::Tensor dq, dk, dv;
  at::Tensor dbias, dsink;
};

/// Seed and offset of a dropout mask, int64 (2), from torch's generator of q's device. Undefined without dropout.
/// Raises where check_problem of the core does, so that a refused call leaves the generator as it was; of tensors
/// without memory (fake, meta) only ranks are checked.
at::Tensor draw_rng_state(const Call& call);

// Results to be written. Their sizes follow from shapes alone, so real and fake tensors share these functions, and a
// fake result always has the shape, strides and dtype of the real one.

/// `out` is kept if defined.
ForwardResult allocate_forward(const Call& call, const at::Tensor& out = {});
/// One tensor for each of Inputs, and `grads` as they or slices of them.
std::vector<at::Tensor> allocate_gradients(const Call& call, Packing packing, Gradients& grads);
at::Tensor allocate_softmax_d(const Call& call);

/// `tensor` itself, or a copy if its last stride is not 1, which the core demands.
at::Tensor contiguous_rows(const at::Tensor& tensor);

/// Runs the forward pass into `out` (allocated if undefined). Every element of the results is written.
ForwardResult forward(const Call& call, const at::Tensor& out = {});

/// Runs the backward pass into the tensors of `grads`, allocated where undefined.
/// Returns softmax_d = rowsum(dout * out) - dlse.
at::Tensor backward(const Call& call, const Saved& saved, Gradients& grads);

/// What the raw functions return as rng_state: zeros without dropout.
at::Tensor reported_rng_state(const Call& call);

/// Draws no seed: the answer does not depend on it.
Explanation explain(Call call, Pass pass);

/// Raises unless S_dmask is either not asked for or exists: there is none without dropout.
void check_return_softmax(const Call& call);

/// The core's view of the call.
AttentionProblem problem_of(const Call& call);

/// Runs `body`, which calls the core. flash_attn::Error is a std::runtime_error, which torch turns into RuntimeError.
template <class Body>
auto calling_core(Body&& body) {
  try {
    return body();
  } catch (const NotSupported& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, error.what());
  }
}

/// Tells autograd that a buffer of the caller's was written, so that it notices when the old contents had been saved.
void mark_written(const at::Tensor& buffer);

}  // namespace flash_attn::torch_binding
