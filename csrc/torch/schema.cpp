// Every operator of the namespace flash_attn: its schema, and the kernel behind each dispatch key.
//
// A tag nondeterministic_seeded tells compilers that the operator draws random numbers; without it a recomputed forward
// pass (activation checkpointing under torch.compile) would silently use another dropout mask than the backward pass.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "ops.h"

namespace {

namespace kernels = flash_attn::torch_binding::kernels;

/// What follows the tensors in the public operators.
#define PUBLIC_ARGUMENTS                                                                                            \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, "         \
  "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "            \
  "Tensor? alibi_slopes, bool deterministic, bool return_softmax) -> (Tensor out, Tensor softmax_lse, Tensor S_dmask)"

void define_public(torch::Library& m) {
  const std::vector<at::Tag> draws{at::Tag::nondeterministic_seeded};
  m.def("attention(Tensor q, Tensor k, Tensor v, " PUBLIC_ARGUMENTS, draws);
  m.def("attention_kvpacked(Tensor q, Tensor kv, " PUBLIC_ARGUMENTS, draws);
  m.def("attention_qkvpacked(Tensor qkv, " PUBLIC_ARGUMENTS, draws);
}

#undef PUBLIC_ARGUMENTS

/// What the public operators are made of: pure, the dropout seed is an argument.
void define_inner(torch::Library& m) {
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng_state, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
      "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
      "-> (Tensor out, Tensor softmax_lse, Tensor S_dmask)");
  // packing 0 returns [dq, dk, dv], 1 [dq, dkv], 2 [dqkv].
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng_state, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
      "float softcap, Tensor? alibi_slopes, bool deterministic, int packing) -> Tensor[]");
}

/// Upstream's operators, with upstream's schemas.
void define_raw(torch::Library& m) {
  const std::vector<at::Tag> draws{at::Tag::nondeterministic_seeded};
  m.def(
      "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
      "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      draws);
  m.def(
      "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
      "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
      "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
      "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)",
      draws);
  m.def(
      "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
      "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, float dropout_p, float softmax_scale, bool causal, "
      "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, "
      "Tensor? rng_state=None) -> Tensor");
  m.def(
      "_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
      "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
      "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
      "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, "
      "bool zero_tensors=False) -> Tensor");
}

constexpr const char* kPublic[] = {"attention", "attention_kvpacked", "attention_qkvpacked"};
constexpr const char* kRawForward[] = {"_flash_attn_forward", "_flash_attn_varlen_forward"};
constexpr const char* kRawBackward[] = {"_flash_attn_backward", "_flash_attn_varlen_backward"};

template <auto* kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

template <auto* kernel>
void implement_all(torch::Library& m) {
  for (const auto* name : kPublic) m.impl(name, boxed<kernel>());
  for (const auto* name : kRawForward) m.impl(name, boxed<kernel>());
  for (const auto* name : kRawBackward) m.impl(name, boxed<kernel>());
  m.impl("attention_forward", boxed<kernel>());
  m.impl("attention_backward", boxed<kernel>());
}

}  // namespace

TORCH_LIBRARY(flash_attn, m) {
  define_public(m);
  define_inner(m);
  define_raw(m);
}

TORCH_LIBRARY_IMPL(flash_attn, CPU, m) {
  for (const auto* name : kPublic) m.impl(name, boxed<kernels::attention>());
  for (const auto* name : kRawForward) m.impl(name, boxed<kernels::raw_forward>());
  for (const auto* name : kRawBackward) m.impl(name, boxed<kernels::raw_backward>());
  m.impl("attention_forward", boxed<kernels::attention_forward>());
  m.impl("attention_backward", boxed<kernels::attention_backward>());
}

TORCH_LIBRARY_IMPL(flash_attn, Meta, m) {
  for (const auto* name : kPublic) m.impl(name, boxed<kernels::attention_meta>());
  for (const auto* name : kRawForward) m.impl(name, boxed<kernels::raw_forward_meta>());
  for (const auto* name : kRawBackward) m.impl(name, boxed<kernels::raw_backward_meta>());
  m.impl("attention_forward", boxed<kernels::attention_meta>());
  m.impl("attention_backward", boxed<kernels::attention_backward_meta>());
}

// Every other device.
TORCH_LIBRARY_IMPL(flash_attn, CompositeExplicitAutograd, m) { implement_all<kernels::refuse_device>(m); }

TORCH_LIBRARY_IMPL(flash_attn, Autograd, m) {
  for (const auto* name : kPublic) m.impl(name, boxed<kernels::attention_autograd>());
  m.impl("attention_backward", boxed<kernels::refuse_double_backward>());
  // These have no formula, as upstream's: differentiating through them raises.
  m.impl("attention_forward", torch::autograd::autogradNotImplementedFallback());
  for (const auto* name : kRawForward) m.impl(name, torch::autograd::autogradNotImplementedFallback());
  for (const auto* name : kRawBackward) m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

// Every torch.func transform, and the older vmap behind batched gradients.
TORCH_LIBRARY_IMPL(flash_attn, FuncTorchDynamicLayerFrontMode, m) { implement_all<kernels::refuse_transform>(m); }
TORCH_LIBRARY_IMPL(flash_attn, Batched, m) { implement_all<kernels::refuse_transform>(m); }
