// Derivative of the public operators: of out and softmax_lse, in q, k and v or their packed forms, attn_bias and
// learnable_sink. S_dmask is not differentiable.
//
// Forward and backward go through the operators attention_forward and attention_backward, which are pure: the dropout
// seed is drawn here and saved. So a compiler that traces this formula sees the draw, and forward, backward and
// recomputation share one mask.
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "ops.h"

namespace flash_attn::torch_binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Saved for backward, after the inputs.
constexpr const char* kSavedTensors[] = {"out",       "softmax_lse", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes",
                                         "rng_state", "attn_mask",   "key_begin",    "key_end"};

/// Differentiable arguments that may be missing, with what asks attention_backward for their gradients. Where given,
/// they follow q, k and v among the inputs of the formula.
constexpr struct {
  const char *name, *wanted;
} kExtraInputs[] = {{"attn_bias", "bias_gradient"}, {"learnable_sink", "sink_gradient"}};

/// Where the name of an argument without a backward pass is kept.
constexpr const char* kForwardOnly = "forward only";

/// None where there is none of that name.
const c10::IValue& value(const Named& arguments, const char* name) {
  static const c10::IValue none;
  const auto given = arguments.find(name);
  return given != arguments.end() ? given->second : none;
}

/// Puts the inputs of the formula in their places; returns those without the extra ones.
at::TensorList set_inputs(at::TensorList inputs, Named& arguments) {
  std::size_t main = inputs.size();
  for (const auto& extra : kExtraInputs) main -= value(arguments, extra.wanted).isNone() ? 0 : 1;
  std::size_t next = main;
  for (const auto& extra : kExtraInputs) {
    if (!value(arguments, extra.wanted).isNone()) arguments[extra.name] = inputs[next++];
  }
  const bool varlen = value(arguments, "cu_seqlens_q").isTensor() || value(arguments, "cu_seqlens_k").isTensor();
  const auto qkv = inputs.slice(0, main);
  const auto [q, k, v] = unpack(qkv, varlen);
  arguments["q"] = q;
  arguments["k"] = k;
  arguments["v"] = v;
  return qkv;
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  /// `arguments`: those of a public operator that are given, and under the names of kExtraInputs' `wanted` whether the
  /// extra input needs its gradient, if that is given. Returns out, softmax_lse, S_dmask.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, Named arguments) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    set_inputs(inputs, arguments);
    arguments["rng_state"] = value_of(draw_rng_state(arguments["q"].toTensor(), arguments["dropout_p"].toDouble()));
    const auto results = call_operator("flash_attn::attention_forward", arguments);
    arguments["out"] = results.at(0);
    arguments["softmax_lse"] = results.at(1);

    variable_list saved = inputs.vec();
    for (const auto* name : kSavedTensors) saved.push_back(tensor_of(value(arguments, name)));
    ctx->save_for_backward(std::move(saved));
    for (const auto& [name, given] : arguments) {
      if (!given.isTensor() && !given.isNone()) ctx->saved_data[name] = given;
    }
    for (const auto* name : {"block_table", "leftpad_k", "seqused_k"}) {
      if (value(arguments, name).isTensor()) ctx->saved_data[kForwardOnly] = std::string(name);
    }
    ctx->mark_non_differentiable({tensor_of(results.at(2))});
    ctx->set_materialize_grads(false);
    return {tensor_of(results.at(0)), tensor_of(results.at(1)), tensor_of(results.at(2))};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto inputs = at::TensorList(saved).slice(0, saved.size() - std::size(kSavedTensors));
    variable_list grads(inputs.size());
    if (const auto given = ctx->saved_data.find(kForwardOnly); given != ctx->saved_data.end()) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "flash_attn: ", given->second.toStringRef(),
                                  " has no backward pass; pass None, or call it under torch.no_grad()");
    }
    if (grad_outputs[0].defined() || grad_outputs[1].defined()) {
      Named arguments = ctx->saved_data;
      auto tensor = saved.begin() + static_cast<std::ptrdiff_t>(inputs.size());
      for (const auto* name : kSavedTensors) {
        if (const auto& given = *tensor++; given.defined()) arguments[name] = given;
      }
      const auto qkv = set_inputs(inputs, arguments);
      arguments["packing"] = static_cast<std::int64_t>(packing_of(qkv));
      arguments["dout"] = grad_outputs[0].defined() ? grad_outputs[0] : at::zeros_like(arguments["out"].toTensor());
      arguments["dlse"] = value_of(grad_outputs[1]);
      std::vector<bool> computed(qkv.size(), true);
      for (const auto& extra : kExtraInputs) {
        auto& wanted = arguments[extra.wanted];
        if (!wanted.isNone()) computed.push_back(wanted.toBool());
        if (wanted.isNone()) wanted = false;
      }
      const auto results = call_operator("flash_attn::attention_backward", arguments).at(0).toTensorVector();
      auto result = results.begin();
      for (std::size_t n = 0; n < computed.size(); ++n) {
        if (computed[n]) grads[n] = *result++;
      }
    }
    grads.emplace_back();  // No gradient for `arguments`.
    return grads;
  }
};

/// torch has no forward-mode derivative of a formula in C++, and does not say whose it was.
void refuse_forward_mode(const Inputs& inputs) {
  for (const auto& input : inputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !input.defined() || !input._fw_grad(/*level=*/0).defined(),
        "flash_attn: attention has no forward-mode derivative (torch.autograd.forward_ad, jvp); "
        "use .backward() or torch.autograd.grad");
  }
}

bool needs_graph(const Inputs& inputs) {
  return at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
           return input.defined() && input.requires_grad();
         });
}

}  // namespace

torch::jit::Stack call_operator(const char* name, const Named& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack;
  for (const auto& argument : op.schema().arguments()) {
    const auto given = arguments.find(argument.name());
    stack.push_back(given != arguments.end() ? given->second : argument.default_value().value_or(c10::IValue()));
  }
  op.callBoxed(&stack);
  return stack;
}

void attention_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Arguments arguments(op, *stack);
  Inputs inputs = arguments.inputs();
  for (const auto& extra : kExtraInputs) {
    if (const auto tensor = arguments.tensor(extra.name); tensor.defined()) inputs.push_back(tensor);
  }
  refuse_forward_mode(inputs);
  // The formula takes longer than the arithmetic of a short call.
  if (!needs_graph(inputs)) return op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  Named named;
  for (const auto& argument : op.schema().arguments()) {
    if (const auto& given = arguments[argument.name()]; !given.isNone()) named[argument.name()] = given;
  }
  for (const auto& extra : kExtraInputs) {
    if (const auto tensor = arguments.tensor(extra.name); tensor.defined())
      named[extra.wanted] = tensor.requires_grad();
  }
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
