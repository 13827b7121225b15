// Derivative of the public operators in q, k and v, or their packed forms. softmax_lse and S_dmask are not
// differentiable.
//
// Forward and backward go through the operators attention_forward and attention_backward, which are pure: the dropout
// seed is drawn here and saved. So a compiler that traces this formula sees the draw, and forward, backward and
// recomputation share one mask.
#include <torch/csrc/autograd/custom_function.h>

#include "ops.h"

namespace flash_attn::torch_binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Arguments of operators by their names in the schemas.
using Named = decltype(AutogradContext::saved_data);

/// Saved for backward, after the inputs.
constexpr const char* kSavedTensors[] = {"out",          "softmax_lse",  "cu_seqlens_q",
                                         "cu_seqlens_k", "alibi_slopes", "rng_state"};

c10::IValue value_of(const at::Tensor& tensor) { return tensor.defined() ? c10::IValue(tensor) : c10::IValue(); }
at::Tensor tensor_of(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }

torch::jit::Stack call_operator(const char* name, const Named& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack;
  for (const auto& argument : op.schema().arguments()) stack.push_back(arguments.at(argument.name()));
  op.callBoxed(&stack);
  return stack;
}

void set_qkv(at::TensorList inputs, Named& arguments) {
  const bool varlen = arguments["cu_seqlens_q"].isTensor() || arguments["cu_seqlens_k"].isTensor();
  const auto [q, k, v] = unpack(inputs, varlen);
  arguments["q"] = q;
  arguments["k"] = k;
  arguments["v"] = v;
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  /// `arguments`: those of a public operator. Returns out, softmax_lse, S_dmask.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, Named arguments) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    set_qkv(inputs, arguments);
    arguments["rng_state"] = value_of(draw_rng_state(arguments["q"].toTensor(), arguments["dropout_p"].toDouble()));
    const auto results = call_operator("flash_attn::attention_forward", arguments);
    arguments["out"] = results.at(0);
    arguments["softmax_lse"] = results.at(1);

    variable_list saved = inputs.vec();
    for (const auto* name : kSavedTensors) saved.push_back(tensor_of(arguments[name]));
    ctx->save_for_backward(std::move(saved));
    for (const auto& [name, value] : arguments) {
      if (!value.isTensor()) ctx->saved_data[name] = value;
    }
    ctx->mark_non_differentiable({tensor_of(results.at(1)), tensor_of(results.at(2))});
    ctx->set_materialize_grads(false);
    return {tensor_of(results.at(0)), tensor_of(results.at(1)), tensor_of(results.at(2))};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto inputs = at::TensorList(saved).slice(0, saved.size() - std::size(kSavedTensors));
    variable_list grads(inputs.size());
    if (const auto& dout = grad_outputs[0]; dout.defined()) {
      Named arguments = ctx->saved_data;
      auto tensor = saved.begin() + static_cast<std::ptrdiff_t>(inputs.size());
      for (const auto* name : kSavedTensors) arguments[name] = value_of(*tensor++);
      set_qkv(inputs, arguments);
      arguments["dout"] = dout;
      arguments["packing"] = static_cast<std::int64_t>(packing_of(inputs));
      grads = call_operator("flash_attn::attention_backward", arguments).at(0).toTensorVector();
    }
    grads.emplace_back();  // No gradient for `arguments`.
    return grads;
  }
};

}  // namespace

void attention_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  const Inputs inputs = arguments.inputs();
  Named named;
  for (const auto& argument : op.schema().arguments()) named[argument.name()] = arguments[argument.name().c_str()];
  const auto results = AttentionFunction::apply(at::TensorList(inputs), std::move(named));
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, results.at(0), results.at(1), results.at(2));
}

// The formula above is a constant to autograd: without this kernel, create_graph=True would give second derivatives
// that are silently wrong.
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

}  // namespace flash_attn::torch_binding
