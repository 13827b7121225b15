// Attention calls on torch tensors: what the operators, the autograd formula and the pybind11 module share.
//
// Letters are those of flash_attn/attention.h: B, H, Hk, Sq, Sk, D, Dv, Tq, Tk.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <flash_attn/attention.h>

#include <string>
#include <vector>

namespace c10 {
class OperatorHandle;
}

namespace flash_attn::torch_binding {

/// Arguments of one call as torch holds them. An undefined tensor is an argument that was not given.
/// Shapes, dtypes and meanings are those of flash_attn::AttentionProblem.
struct Call {
  at::Tensor q, k, v;
  at::Tensor cu_seqlens_q, cu_seqlens_k;
  at::Tensor alibi_slopes, rng_state;
  c10::SymInt max_seqlen_q = 0, max_seqlen_k = 0;
  c10::SymInt window_left = -1, window_right = -1;
  double dropout_p = 0.0, softmax_scale = 1.0, softcap = 0.0;
  bool causal = false;
  bool return_softmax = false;

  bool varlen() const { return cu_seqlens_q.defined() || cu_seqlens_k.defined(); }
};

/// The tensors that autograd sees: {q, k, v}, {q, kv} or {qkv}. A packed one has its 2 or 3 parts along dimension -3.
using Inputs = std::vector<at::Tensor>;
enum class Packing : std::int64_t { none = 0, kv = 1, qkv = 2 };
inline Packing packing_of(at::TensorList inputs) { return static_cast<Packing>(3 - inputs.size()); }

/// Sets call.q, call.k, call.v to `inputs` or to views of their parts.
void unpack(at::TensorList inputs, Call& call);

struct ForwardResult {
  at::Tensor out, softmax_lse, s_dmask;
};

/// What the backward pass needs of the forward one, beside its arguments.
struct Saved {
  at::Tensor dout, out, softmax_lse;
};

struct Gradients {
  at::Tensor dq, dk, dv;
};

/// Seed and offset of a call's dropout mask, int64 (2), from torch's generator of q's device; undefined without dropout.
at::Tensor draw_rng_state(const Call& call);

/// Runs the forward pass into `out` (allocated if undefined). Every element of the results is written.
ForwardResult forward(const Call& call, const at::Tensor& out = {});

/// Runs the backward pass into the tensors of `grads`, allocated where undefined. Returns softmax_d = rowsum(dout * out).
at::Tensor backward(const Call& call, const Saved& saved, Gradients& grads);

/// What the raw functions return as rng_state: zeros without dropout.
at::Tensor reported_rng_state(const Call& call);

/// Draws no seed: the answer does not depend on it.
Explanation explain(Call call, Pass pass);

/// Raises unless S_dmask is either not asked for or exists: there is none without dropout.
void check_return_softmax(const Call& call);

/// Raises for features of upstream's varlen forward that this build lacks.
void refuse_cache_arguments(const at::Tensor& block_table, const at::Tensor& leftpad_k, const at::Tensor& seqused_k);

/// Arguments on an operator's stack, found by the names in its schema, so that each argument list exists only there.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  /// None if the operator has no such argument.
  const c10::IValue& operator[](const char* name) const;
  /// Undefined for None.
  at::Tensor tensor(const char* name) const;
  /// The Call without q, k and v of a packed operator.
  Call call() const;
  Inputs inputs() const;

 private:
  const c10::FunctionSchema& schema_;
  const c10::IValue* first_;
};

/// Boxed kernels; schema.cpp says which operator and dispatch key each serves.
namespace kernels {
using Boxed = void(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The operators on memory.
Boxed attention, attention_forward, attention_backward, raw_forward, raw_backward;
// The same, shapes only (Meta and fake tensors).
Boxed attention_meta, attention_backward_meta, raw_forward_meta, raw_backward_meta;
// Any device that no backend of this build serves.
Boxed refuse_device;
// torch.func transforms: vmap, grad, jvp and what is built on them.
Boxed refuse_transform;
// Autograd of the public operators.
Boxed attention_autograd;
// Autograd of attention_backward: its own derivative does not exist.
void refuse_double_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
}  // namespace kernels

}  // namespace flash_attn::torch_binding
