// Every operator of the namespace flash_attn: its schema, its kernels, and which dispatch key each kernel serves.
#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <sstream>

#include "views.h"

namespace flash_attn::torch_binding {

Arguments meta_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const Arguments arguments(op, stack);
  std::ostringstream devices;
  bool all_meta = true;
  for (const Name name : arguments.signature().names()) {
    const auto& tensor = arguments[name];
    if (!tensor.isTensor()) continue;
    const auto device = tensor.toTensor().device();
    all_meta = all_meta && device.is_meta();
    devices << (devices.tellp() > 0 ? ", " : "") << name.text() << " on " << device;
  }
  TORCH_CHECK(all_meta, "flash_attn: all tensors of a call must be on one device, got ", devices.str());
  return arguments;
}

void refuse_transform(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      " does not work inside torch.func transforms (vmap, grad, vjp, jvp, jacrev, ...) or batched "
      "gradients; call it outside of them, and use .backward() or torch.autograd.grad");
}

namespace {

// ---- Schemas.
// A tag nondeterministic_seeded tells compilers that the operator draws random numbers; without it a recomputed forward
// pass (activation checkpointing under torch.compile) would silently use another dropout mask than the backward pass.

/// Beyond upstream's arguments.
#define SCORE_ARGUMENTS                                                                                   \
  "Tensor? attn_bias=None, Tensor? attn_mask=None, Tensor? learnable_sink=None, Tensor? key_begin=None, " \
  "Tensor? key_end=None"

/// Of operators with k and v; forward only.
#define STORAGE_ARGUMENTS "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, int num_splits=0"

#define PUBLIC_RESULTS ") -> (Tensor out, Tensor softmax_lse, Tensor S_dmask)"

/// What follows the tensors in the public operators.
#define PUBLIC_ARGUMENTS                                                                                    \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, " \
  "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "    \
  "Tensor? alibi_slopes, bool deterministic, bool return_softmax, " SCORE_ARGUMENTS

void define_public(torch::Library& m) {
  const std::vector<at::Tag> draws{at::Tag::nondeterministic_seeded};
  m.def("attention(Tensor q, Tensor k, Tensor v, " PUBLIC_ARGUMENTS ", " STORAGE_ARGUMENTS PUBLIC_RESULTS, draws);
  m.def("attention_kvpacked(Tensor q, Tensor kv, " PUBLIC_ARGUMENTS PUBLIC_RESULTS, draws);
  m.def("attention_qkvpacked(Tensor qkv, " PUBLIC_ARGUMENTS PUBLIC_RESULTS, draws);
}

#undef PUBLIC_ARGUMENTS

/// What the public operators are made of: pure, the dropout seed is an argument.
void define_inner(torch::Library& m) {
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng_state, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
      "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, "
      "bool return_softmax, " SCORE_ARGUMENTS ", " STORAGE_ARGUMENTS PUBLIC_RESULTS);
  // packing 0 returns [dq, dk, dv], 1 [dq, dkv], 2 [dqkv]; then the gradients of attn_bias and learnable_sink that are
  // asked for.
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng_state, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
      "float softcap, Tensor? alibi_slopes, bool deterministic, int packing, " SCORE_ARGUMENTS
      ", Tensor? dlse=None, bool bias_gradient=False, bool sink_gradient=False) -> Tensor[]");
}

#undef SCORE_ARGUMENTS
#undef STORAGE_ARGUMENTS
#undef PUBLIC_RESULTS

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

// ---- Reading arguments.
// Two arguments need no reading: zero_tensors, since every element of every output is always written, and
// deterministic, since no backend of this build has a nondeterministic backward pass.

Call with_contiguous_rows(Call call) {
  call.q = contiguous_rows(call.q);
  call.k = contiguous_rows(call.k);
  call.v = contiguous_rows(call.v);
  call.attn_bias = contiguous_rows(call.attn_bias);
  if (call.learnable_sink.defined()) call.learnable_sink = call.learnable_sink.contiguous();
  return call;
}

Packing read_packing(const Arguments& arguments) {
  const auto packing = arguments["packing"].toInt();
  TORCH_CHECK(packing >= 0 && packing <= 2, "flash_attn: packing must be 0 (q, k, v), 1 (q, kv) or 2 (qkv), got ",
              packing);
  return static_cast<Packing>(packing);
}

Gradients read_gradients(const Arguments& arguments) {
  return {arguments.tensor("dq"), arguments.tensor("dk"), arguments.tensor("dv"), {}, {}};
}

Saved read_saved(const Arguments& arguments) {
  const auto dlse = arguments.tensor("dlse");
  return {contiguous_rows(arguments.tensor("dout")), contiguous_rows(arguments.tensor("out")),
          arguments.tensor("softmax_lse").contiguous(), dlse.defined() ? dlse.contiguous() : dlse};
}

/// The call of a raw forward operator.
Call read_raw_call(const Arguments& arguments) {
  const Call call = arguments.call();
  check_return_softmax(call);
  return call;
}

Call read_public_call(const Arguments& arguments) {
  Call call = arguments.call();
  std::tie(call.q, call.k, call.v) = unpack(arguments.inputs(), call.varlen());
  return call;
}

// ---- Kernels.

void attention_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call = with_contiguous_rows(read_public_call(Arguments(op, *stack)));
  call.rng_state = draw_rng_state(call);
  const auto result = forward(call);
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask);
}

void attention_forward_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = forward(with_contiguous_rows(Arguments(op, *stack).call()));
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask);
}

void attention_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = allocate_forward(read_public_call(meta_arguments(op, *stack)), {});
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask);
}

/// What attention_backward returns.
std::vector<at::Tensor> allocate_results(const Arguments& arguments, const Call& call, Gradients& grads) {
  auto buffers = allocate_gradients(call, read_packing(arguments), grads);
  const auto add = [&](bool wanted, const at::Tensor& of, const char* name, at::Tensor& grad) {
    if (!wanted) return;
    TORCH_CHECK(of.defined(), "flash_attn: the gradient of ", name, " is asked for, but ", name,
                " is None; pass it, or do not ask for its gradient");
    buffers.push_back(grad = at::empty_symint(of.sym_sizes(), of.options()));
  };
  add(arguments["bias_gradient"].toBool(), call.attn_bias, "attn_bias", grads.dbias);
  add(arguments["sink_gradient"].toBool(), call.learnable_sink, "learnable_sink", grads.dsink);
  return buffers;
}

void attention_backward_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  const Call call = with_contiguous_rows(arguments.call());
  Gradients grads;
  const auto buffers = allocate_results(arguments, call, grads);
  backward(call, read_saved(arguments), grads);
  reply(stack, op, buffers);
}

void attention_backward_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments = meta_arguments(op, *stack);
  Gradients grads;
  const auto buffers = allocate_results(arguments, arguments.call(), grads);
  reply(stack, op, buffers);
}

void raw_forward_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call = with_contiguous_rows(read_raw_call(Arguments(op, *stack)));
  call.rng_state = draw_rng_state(call);
  const auto result = forward(call);
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask, reported_rng_state(call));
}

void raw_forward_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call = read_raw_call(meta_arguments(op, *stack));
  const auto result = allocate_forward(call, {});
  const auto rng_state = at::empty({2}, call.q.options().dtype(at::kLong));
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask, rng_state);
}

void raw_backward_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  Gradients grads = read_gradients(arguments);
  reply(stack, op, backward(with_contiguous_rows(arguments.call()), read_saved(arguments), grads));
}

void raw_backward_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call = meta_arguments(op, *stack).call();
  reply(stack, op, allocate_softmax_d(call));
}

void refuse_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  for (const Name name : arguments.signature().names()) {
    if (arguments[name].isTensor()) check_plain(arguments[name].toTensor(), name.text());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              " has no kernel for this kind of tensor; backends of this build: cpu, cuda");
}

// ---- Registration.

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

TORCH_LIBRARY(flash_attn, m) {
  define_public(m);
  define_inner(m);
  define_raw(m);
}

// The same for every device: the core chooses the backend.
void implement_kernels(torch::Library& m) {
  for (const auto* name : kPublic) m.impl(name, boxed<attention_kernel>());
  for (const auto* name : kRawForward) m.impl(name, boxed<raw_forward_kernel>());
  for (const auto* name : kRawBackward) m.impl(name, boxed<raw_backward_kernel>());
  m.impl("attention_forward", boxed<attention_forward_kernel>());
  m.impl("attention_backward", boxed<attention_backward_kernel>());
}

TORCH_LIBRARY_IMPL(flash_attn, CPU, m) { implement_kernels(m); }
// torch's name for AMD's GPUs too.
TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) { implement_kernels(m); }

TORCH_LIBRARY_IMPL(flash_attn, Meta, m) {
  for (const auto* name : kPublic) m.impl(name, boxed<attention_meta>());
  for (const auto* name : kRawForward) m.impl(name, boxed<raw_forward_meta>());
  for (const auto* name : kRawBackward) m.impl(name, boxed<raw_backward_meta>());
  m.impl("attention_forward", boxed<attention_meta>());
  m.impl("attention_backward", boxed<attention_backward_meta>());
}

// Every other device.
TORCH_LIBRARY_IMPL(flash_attn, CompositeExplicitAutograd, m) { implement_all<refuse_device>(m); }

TORCH_LIBRARY_IMPL(flash_attn, Autograd, m) {
  for (const auto* name : kPublic) m.impl(name, boxed<attention_autograd>());
  m.impl("attention_backward", boxed<refuse_double_backward>());
  // These have no formula, as upstream's: differentiating through them raises.
  m.impl("attention_forward", torch::autograd::autogradNotImplementedFallback());
  for (const auto* name : kRawForward) m.impl(name, torch::autograd::autogradNotImplementedFallback());
  for (const auto* name : kRawBackward) m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

// Every torch.func transform, and the older vmap behind batched gradients.
TORCH_LIBRARY_IMPL(flash_attn, FuncTorchDynamicLayerFrontMode, m) { implement_all<refuse_transform>(m); }
TORCH_LIBRARY_IMPL(flash_attn, Batched, m) { implement_all<refuse_transform>(m); }

}  // namespace
}  // namespace flash_attn::torch_binding
