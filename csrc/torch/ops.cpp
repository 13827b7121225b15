// Kernels of the operators: on memory through the core, and shapes only. Both allocate through the same functions, so
// a fake result always has the shape, strides and dtype of the real one.
#include "ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "views.h"

namespace flash_attn::torch_binding {
namespace {

using Sizes = std::vector<c10::SymInt>;

std::int64_t concrete(const c10::SymInt& value) { return value.guard_int(__FILE__, __LINE__); }

/// Runs `body`, which calls the core. flash_attn::Error is a std::runtime_error, which torch turns into RuntimeError.
template <class Body>
auto calling_core(Body&& body) {
  try {
    return body();
  } catch (const NotSupported& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, error.what());
  }
}

/// The core demands last stride 1; a tensor that lacks it is copied.
at::Tensor contiguous_rows(const at::Tensor& tensor) {
  const bool as_is = !tensor.defined() || tensor.dim() == 0 || tensor.stride(-1) == 1 || tensor.size(-1) <= 1;
  return as_is ? tensor : tensor.contiguous();
}

Call with_contiguous_rows(Call call) {
  call.q = contiguous_rows(call.q);
  call.k = contiguous_rows(call.k);
  call.v = contiguous_rows(call.v);
  return call;
}

AttentionProblem problem_of(const Call& call) {
  const at::Device device = call.q.device();
  AttentionProblem problem;
  problem.q = view(call.q, "q", device);
  problem.k = view(call.k, "k", device);
  problem.v = view(call.v, "v", device);
  problem.cu_seqlens_q = view(call.cu_seqlens_q, "cu_seqlens_q", device);
  problem.cu_seqlens_k = view(call.cu_seqlens_k, "cu_seqlens_k", device);
  problem.max_seqlen_q = concrete(call.max_seqlen_q);
  problem.max_seqlen_k = concrete(call.max_seqlen_k);
  problem.softmax_scale = call.softmax_scale;
  problem.softcap = call.softcap;
  problem.causal = call.causal;
  problem.window_left = concrete(call.window_left);
  problem.window_right = concrete(call.window_right);
  problem.alibi_slopes = view(call.alibi_slopes, "alibi_slopes", device);
  problem.dropout_p = call.dropout_p;
  problem.rng_state = view(call.rng_state, "rng_state", device);
  return problem;
}

/// The sizes of the outputs come from these tensors before the core sees the problem.
void check_ranks(const Call& call) {
  const auto check = [&](const at::Tensor& tensor, const char* name, const char* dense, const char* varlen) {
    const int ndim = call.varlen() ? 3 : 4;
    TORCH_CHECK(tensor.dim() == ndim, "flash_attn: ", name, " must have ", ndim, " dimensions ",
                call.varlen() ? varlen : dense, call.varlen() ? " when cu_seqlens are given" : "", ", got shape ",
                tensor.sym_sizes());
  };
  check(call.q, "q", "(B, Sq, H, D)", "(Tq, H, D)");
  check(call.k, "k", "(B, Sk, Hk, D)", "(Tk, Hk, D)");
  check(call.v, "v", "(B, Sk, Hk, Dv)", "(Tk, Hk, Dv)");
}

at::Tensor allocate_like_lse(const Call& call) {
  const auto& q = call.q;
  const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Sizes sizes = call.varlen() ? Sizes{q.sym_size(1), q.sym_size(0)}
                                    : Sizes{q.sym_size(0), q.sym_size(2), q.sym_size(1)};
  return at::empty_symint(sizes, q.options().dtype(dtype));
}

at::Tensor allocate_s_dmask(const Call& call) {
  const auto options = call.q.options();
  if (!call.return_softmax || !(call.dropout_p > 0)) return at::empty({0}, options);
  if (!call.varlen()) {
    return at::empty_symint({call.q.sym_size(0), call.q.sym_size(2), call.q.sym_size(1), call.k.sym_size(1)}, options);
  }
  const auto check_size = [](const c10::SymInt& size, const char* name, int least) {
    if (!size.is_symbolic()) TORCH_CHECK(size >= least, "flash_attn: ", name, " must be at least ", least, ", got ", size);
  };
  const auto& cu_seqlens = call.cu_seqlens_q.defined() ? call.cu_seqlens_q : call.cu_seqlens_k;
  check_size(cu_seqlens.sym_numel(), "the size B + 1 of cu_seqlens_q", 1);
  check_size(call.max_seqlen_q, "max_seqlen_q", 0);
  check_size(call.max_seqlen_k, "max_seqlen_k", 0);
  return at::empty_symint({cu_seqlens.sym_numel() - 1, call.q.sym_size(1), call.max_seqlen_q, call.max_seqlen_k},
                          options);
}

ForwardResult allocate_forward(const Call& call, const at::Tensor& out) {
  check_ranks(call);
  Sizes sizes = call.q.sym_sizes().vec();
  sizes.back() = call.v.sym_size(-1);
  return {out.defined() ? out : at::empty_symint(sizes, call.q.options()), allocate_like_lse(call),
          allocate_s_dmask(call)};
}

at::Tensor allocate_like(const at::Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); }

/// Buffers with the layout of the caller's inputs, and `grads` as slices of them.
std::vector<at::Tensor> allocate_gradients(const Call& call, Packing packing, Gradients& grads) {
  const auto packed_like = [](const at::Tensor& part, int parts) {
    Sizes sizes = part.sym_sizes().vec();
    sizes.insert(sizes.end() - 2, c10::SymInt(parts));
    return at::empty_symint(sizes, part.options());
  };
  check_ranks(call);
  if (packing == Packing::qkv) {
    const auto dqkv = packed_like(call.q, 3);
    grads = {dqkv.select(-3, 0), dqkv.select(-3, 1), dqkv.select(-3, 2)};
    return {dqkv};
  }
  const auto dq = allocate_like(call.q);
  if (packing == Packing::kv) {
    const auto dkv = packed_like(call.k, 2);
    grads = {dq, dkv.select(-3, 0), dkv.select(-3, 1)};
    return {dq, dkv};
  }
  grads = {dq, allocate_like(call.k), allocate_like(call.v)};
  return {grads.dq, grads.dk, grads.dv};
}

/// Tells autograd that a buffer of the caller's was written, so that it notices when the old contents had been saved.
void mark_written(const at::Tensor& buffer) {
  if (buffer.defined() && !buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
}

Packing read_packing(const Arguments& arguments) {
  const auto packing = arguments["packing"].toInt();
  TORCH_CHECK(packing >= 0 && packing <= 2, "flash_attn: packing must be 0 (q, k, v), 1 (q, kv) or 2 (qkv), got ", packing);
  return static_cast<Packing>(packing);
}

Gradients read_gradients(const Arguments& arguments) {
  return {arguments.tensor("dq"), arguments.tensor("dk"), arguments.tensor("dv")};
}

Saved read_saved(const Arguments& arguments) {
  return {arguments.tensor("dout"), arguments.tensor("out"), arguments.tensor("softmax_lse")};
}

/// The call of a raw operator. zero_tensors needs no reading: every element of every output is always written.
Call read_raw_call(const Arguments& arguments) {
  refuse_cache_arguments(arguments.tensor("block_table"), arguments.tensor("leftpad_k"),
                         arguments.tensor("seqused_k"));
  const Call call = arguments.call();
  check_return_softmax(call);
  return call;
}

Call read_public_call(const Arguments& arguments) {
  Call call = arguments.call();
  unpack(arguments.inputs(), call);
  return call;
}

/// Arguments of a call on shapes. One meta tensor is enough to get here, and any other would give results without values.
Arguments meta_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const Arguments arguments(op, stack);
  for (const auto& argument : op.schema().arguments()) {
    const auto* name = argument.name().c_str();
    if (arguments[name].isTensor()) check_device(arguments.tensor(name), name, at::kMeta);
  }
  return arguments;
}

template <class... Results>
void reply(torch::jit::Stack* stack, const c10::OperatorHandle& op, Results&&... results) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, std::forward<Results>(results)...);
}

}  // namespace

void unpack(at::TensorList inputs, Call& call) {
  const auto part = [&](const at::Tensor& packed, int index, const char* name, int parts) {
    TORCH_CHECK(packed.dim() == (call.varlen() ? 4 : 5) && packed.sym_size(-3) == parts, "flash_attn: ", name,
                " must have shape ", call.varlen() ? "(T, " : "(B, S, ", parts, ", H, D), got ", packed.sym_sizes());
    return packed.select(-3, index);
  };
  switch (packing_of(inputs)) {
    case Packing::none:
      call.q = inputs[0];
      call.k = inputs[1];
      call.v = inputs[2];
      break;
    case Packing::kv:
      call.q = inputs[0];
      call.k = part(inputs[1], 0, "kv", 2);
      call.v = part(inputs[1], 1, "kv", 2);
      break;
    case Packing::qkv:
      call.q = part(inputs[0], 0, "qkv", 3);
      call.k = part(inputs[0], 1, "qkv", 3);
      call.v = part(inputs[0], 2, "qkv", 3);
      break;
  }
}

at::Tensor draw_rng_state(const Call& call) {
  if (!(call.dropout_p > 0)) return {};
  return at::randint(std::numeric_limits<std::int64_t>::max(), {2}, call.q.options().dtype(at::kLong));
}

ForwardResult forward(const Call& call, const at::Tensor& out) {
  ForwardArgs args;
  args.problem = problem_of(call);
  const ForwardResult result = allocate_forward(call, out);
  const at::Device device = call.q.device();
  args.out = view(result.out, "out", device);
  args.lse = view(result.softmax_lse, "softmax_lse", device);
  if (call.return_softmax && call.dropout_p > 0) args.s_dmask = view(result.s_dmask, "S_dmask", device);
  calling_core([&] { attention_forward(args, torch_executor()); });
  mark_written(out);
  return result;
}

at::Tensor backward(const Call& call, const Saved& saved, Gradients& grads) {
  BackwardArgs args;
  args.problem = problem_of(call);
  check_ranks(call);
  const at::Device device = call.q.device();
  const auto destination = [&](at::Tensor& grad, const at::Tensor& like, const char* name) {
    if (!grad.defined()) grad = allocate_like(like);
    return view(grad, name, device);
  };
  args.dout = view(saved.dout, "dout", device);
  args.out = view(saved.out, "out", device);
  args.lse = view(saved.softmax_lse, "softmax_lse", device);
  args.dq = destination(grads.dq, call.q, "dq");
  args.dk = destination(grads.dk, call.k, "dk");
  args.dv = destination(grads.dv, call.v, "dv");
  const auto softmax_d = allocate_like_lse(call);
  args.softmax_d = view(softmax_d, "softmax_d", device);
  calling_core([&] { attention_backward(args, torch_executor()); });
  for (const auto* grad : {&grads.dq, &grads.dk, &grads.dv}) mark_written(*grad);
  return softmax_d;
}

at::Tensor reported_rng_state(const Call& call) {
  return call.rng_state.defined() ? call.rng_state : at::zeros({2}, call.q.options().dtype(at::kLong));
}

Explanation explain(Call call, Pass pass) {
  call.rng_state = reported_rng_state(call);
  return calling_core([&] { return flash_attn::explain(problem_of(call), pass); });
}

void check_return_softmax(const Call& call) {
  TORCH_CHECK(!call.return_softmax || call.dropout_p > 0,
              "flash_attn: return_softmax=True needs dropout_p > 0, got ", call.dropout_p, "; pass return_softmax=False");
}

void refuse_cache_arguments(const at::Tensor& block_table, const at::Tensor& leftpad_k, const at::Tensor& seqused_k) {
  const auto refuse = [](const at::Tensor& tensor, const char* name) {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined(), "flash_attn: ", name,
                                " is not supported yet; pass None, with k and v of shape (Tk, Hk, D) whose lengths "
                                "cu_seqlens_k gives");
  };
  refuse(block_table, "block_table");
  refuse(leftpad_k, "leftpad_k");
  refuse(seqused_k, "seqused_k");
}

Arguments::Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
    : schema_(op.schema()), first_(stack.data() + stack.size() - schema_.arguments().size()) {}

const c10::IValue& Arguments::operator[](const char* name) const {
  static const c10::IValue none;
  const auto index = schema_.argumentIndexWithName(name);
  return index ? first_[*index] : none;
}

at::Tensor Arguments::tensor(const char* name) const {
  const auto& value = (*this)[name];
  return value.isNone() ? at::Tensor() : value.toTensor();
}

Call Arguments::call() const {
  const auto& self = *this;
  const auto given = [&](const char* name) { return !self[name].isNone(); };
  Call call;
  call.q = tensor("q"), call.k = tensor("k"), call.v = tensor("v");
  call.cu_seqlens_q = tensor("cu_seqlens_q"), call.cu_seqlens_k = tensor("cu_seqlens_k");
  call.alibi_slopes = tensor("alibi_slopes"), call.rng_state = tensor("rng_state");
  if (given("max_seqlen_q")) call.max_seqlen_q = self["max_seqlen_q"].toSymInt();
  if (given("max_seqlen_k")) call.max_seqlen_k = self["max_seqlen_k"].toSymInt();
  call.window_left = self["window_size_left"].toSymInt();
  call.window_right = self["window_size_right"].toSymInt();
  call.dropout_p = self["dropout_p"].toDouble();
  call.softmax_scale = self["softmax_scale"].toDouble();
  call.softcap = self["softcap"].toDouble();
  call.causal = self["causal"].toBool();
  if (given("return_softmax")) call.return_softmax = self["return_softmax"].toBool();
  return call;
}

Inputs Arguments::inputs() const {
  if (const auto qkv = tensor("qkv"); qkv.defined()) return {qkv};
  if (const auto kv = tensor("kv"); kv.defined()) return {tensor("q"), kv};
  return {tensor("q"), tensor("k"), tensor("v")};
}

namespace kernels {

void attention(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call = with_contiguous_rows(read_public_call(Arguments(op, *stack)));
  call.rng_state = draw_rng_state(call);
  const auto result = forward(call);
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask);
}

void attention_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = forward(with_contiguous_rows(Arguments(op, *stack).call()));
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask);
}

void attention_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = allocate_forward(read_public_call(meta_arguments(op, *stack)), {});
  reply(stack, op, result.out, result.softmax_lse, result.s_dmask);
}

void attention_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  const Call call = with_contiguous_rows(arguments.call());
  Saved saved = read_saved(arguments);
  saved = {contiguous_rows(saved.dout), contiguous_rows(saved.out), saved.softmax_lse.contiguous()};
  Gradients grads;
  const auto buffers = allocate_gradients(call, read_packing(arguments), grads);
  backward(call, saved, grads);
  reply(stack, op, buffers);
}

void attention_backward_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments = meta_arguments(op, *stack);
  Gradients grads;
  const auto buffers = allocate_gradients(arguments.call(), read_packing(arguments), grads);
  reply(stack, op, buffers);
}

void raw_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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

void raw_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  Saved saved = read_saved(arguments);
  saved = {contiguous_rows(saved.dout), contiguous_rows(saved.out), saved.softmax_lse.contiguous()};
  Gradients grads = read_gradients(arguments);
  const auto softmax_d = backward(with_contiguous_rows(arguments.call()), saved, grads);
  reply(stack, op, softmax_d);
}

void raw_backward_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call = meta_arguments(op, *stack).call();
  check_ranks(call);
  const auto softmax_d = allocate_like_lse(call);
  reply(stack, op, softmax_d);
}

void refuse_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  for (const auto& argument : op.schema().arguments()) {
    const auto& value = arguments[argument.name().c_str()];
    if (value.isTensor()) check_plain(value.toTensor(), argument.name().c_str());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), " has no kernel for this kind of tensor; backends of this build: ",
                              kBackends);
}

void refuse_transform(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              " does not work inside torch.func transforms (vmap, grad, vjp, jvp, jacrev, ...) or batched "
                              "gradients; call it outside of them, and use .backward() or torch.autograd.grad");
}

}  // namespace kernels
}  // namespace flash_attn::torch_binding
