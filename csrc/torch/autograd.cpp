// Derivative of the public operators. Differentiable in q, k and v (or their packed forms); softmax_lse and S_dmask are not.
//
// Forward and backward go through the operators attention_forward and attention_backward, which are pure: the dropout
// seed is drawn here and saved. So a compiler that traces this formula sees the draw, and forward, backward and
// recomputation share one mask.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops.h"

namespace flash_attn::torch_binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

c10::IValue optional_value(const at::Tensor& tensor) { return tensor.defined() ? c10::IValue(tensor) : c10::IValue(); }

/// Calls flash_attn::<name> with `arguments` in the order of its schema.
torch::jit::Stack call_operator(const char* name, torch::jit::Stack arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&arguments);
  return arguments;
}

ForwardResult call_forward(const Call& call) {
  const auto results = call_operator(
      "flash_attn::attention_forward",
      {call.q, call.k, call.v, optional_value(call.cu_seqlens_q), optional_value(call.cu_seqlens_k),
       optional_value(call.rng_state), call.max_seqlen_q, call.max_seqlen_k, call.dropout_p, call.softmax_scale,
       call.causal, call.window_left, call.window_right, call.softcap, optional_value(call.alibi_slopes),
       call.return_softmax});
  return {results.at(0).toTensor(), results.at(1).toTensor(), results.at(2).toTensor()};
}

std::vector<at::Tensor> call_backward(const Call& call, const Saved& saved, bool deterministic, Packing packing) {
  const auto results = call_operator(
      "flash_attn::attention_backward",
      {saved.dout, call.q, call.k, call.v, saved.out, saved.softmax_lse, optional_value(call.cu_seqlens_q),
       optional_value(call.cu_seqlens_k), optional_value(call.rng_state), call.max_seqlen_q, call.max_seqlen_k,
       call.dropout_p, call.softmax_scale, call.causal, call.window_left, call.window_right, call.softcap,
       optional_value(call.alibi_slopes), deterministic, static_cast<std::int64_t>(packing)});
  return results.at(0).toTensorVector();
}

void save_scalars(AutogradContext* ctx, const Call& call) {
  auto& data = ctx->saved_data;
  data["max_seqlen_q"] = call.max_seqlen_q;
  data["max_seqlen_k"] = call.max_seqlen_k;
  data["window_left"] = call.window_left;
  data["window_right"] = call.window_right;
  data["dropout_p"] = call.dropout_p;
  data["softmax_scale"] = call.softmax_scale;
  data["softcap"] = call.softcap;
  data["causal"] = call.causal;
}

void load_scalars(AutogradContext* ctx, Call& call) {
  auto& data = ctx->saved_data;
  call.max_seqlen_q = data["max_seqlen_q"].toSymInt();
  call.max_seqlen_k = data["max_seqlen_k"].toSymInt();
  call.window_left = data["window_left"].toSymInt();
  call.window_right = data["window_right"].toSymInt();
  call.dropout_p = data["dropout_p"].toDouble();
  call.softmax_scale = data["softmax_scale"].toDouble();
  call.softcap = data["softcap"].toDouble();
  call.causal = data["causal"].toBool();
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  /// Returns out, softmax_lse, S_dmask.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, bool deterministic, Call call) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    unpack(inputs, call);
    call.rng_state = draw_rng_state(call);
    const auto result = call_forward(call);
    variable_list saved{result.out,       result.softmax_lse, call.cu_seqlens_q, call.cu_seqlens_k,
                        call.alibi_slopes, call.rng_state};
    saved.insert(saved.end(), inputs.begin(), inputs.end());
    ctx->save_for_backward(std::move(saved));
    save_scalars(ctx, call);
    ctx->saved_data["deterministic"] = deterministic;
    ctx->mark_non_differentiable({result.softmax_lse, result.s_dmask});
    ctx->set_materialize_grads(false);
    return {result.out, result.softmax_lse, result.s_dmask};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const variable_list inputs(saved.begin() + 6, saved.end());
    const auto& dout = grad_outputs[0];
    variable_list grads(inputs.size());
    if (dout.defined()) {
      Call call;
      load_scalars(ctx, call);
      call.cu_seqlens_q = saved[2];
      call.cu_seqlens_k = saved[3];
      call.alibi_slopes = saved[4];
      call.rng_state = saved[5];
      unpack(inputs, call);
      grads = call_backward(call, {dout, saved[0], saved[1]}, ctx->saved_data["deterministic"].toBool(),
                            packing_of(inputs));
    }
    grads.resize(inputs.size() + 2);  // No gradient for the other arguments of forward.
    return grads;
  }
};

}  // namespace

namespace kernels {

void attention_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  const auto inputs = arguments.inputs();
  const auto results =
      AttentionFunction::apply(at::TensorList(inputs), arguments["deterministic"].toBool(), arguments.call());
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, results.at(0), results.at(1), results.at(2));
}

// The formula above is a constant to autograd: without this kernel, create_graph=True would give second derivatives that
// are silently wrong.
void refuse_double_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (at::GradMode::is_enabled()) {
    for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !argument.isTensor() || !argument.toTensor().requires_grad(),
          "flash_attn: attention has no second derivative (double backward, create_graph=True); for those compute "
          "softmax(scale * q k^T) v with plain torch operations");
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace kernels
}  // namespace flash_attn::torch_binding
