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

/// Tensors saved for backward, after the inputs: what forward makes, then arguments.
constexpr const char* kSavedResults[] = {"out", "softmax_lse", "rng_state"};
constexpr const char* kSavedArguments[] = {"cu_seqlens_q", "cu_seqlens_k", "alibi_slopes",
                                           "attn_mask",    "key_begin",    "key_end"};

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

c10::OperatorHandle find_operator(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

/// attention_forward with these tensors and what else `arguments` of a public operator has.
torch::jit::Stack call_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& rng_state, const Arguments& arguments) {
  static const auto op = find_operator("flash_attn::attention_forward");
  torch::jit::Stack stack{q, k, v};
  for (const auto& argument : at::ArrayRef(op.schema().arguments()).slice(stack.size())) {
    const auto& given = arguments[argument.name()];
    if (argument.name() == "rng_state")
      stack.push_back(value_of(rng_state));
    else
      stack.push_back(given.isNone() ? argument.default_value().value_or(given) : given);
  }
  op.callBoxed(&stack);
  return stack;
}

/// What a forward pass makes that backward reads.
struct Made {
  at::Tensor out, softmax_lse, rng_state;
};

/// Keeps what attention_backward takes of the arguments of a public operator.
void save(AutogradContext* ctx, at::TensorList inputs, const Made& made, const Arguments& arguments) {
  static const auto op = find_operator("flash_attn::attention_backward");
  variable_list saved = inputs.vec();
  saved.insert(saved.end(), {made.out, made.softmax_lse, made.rng_state});
  for (const auto* name : kSavedArguments) saved.push_back(arguments.tensor(name));
  ctx->save_for_backward(std::move(saved));
  for (const auto& argument : op.schema().arguments()) {
    const auto& given = arguments[argument.name()];
    if (!given.isTensor() && !given.isNone()) ctx->saved_data[argument.name()] = given;
  }
  for (const auto* name : {"block_table", "leftpad_k", "seqused_k"}) {
    if (arguments.tensor(name).defined()) ctx->saved_data[kForwardOnly] = std::string(name);
  }
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  /// `arguments`: those of a public operator. Returns out, softmax_lse, S_dmask.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const Arguments& arguments) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& extra : kExtraInputs) {
      if (const auto tensor = arguments.tensor(extra.name); tensor.defined())
        ctx->saved_data[extra.wanted] = tensor.requires_grad();
    }
    const auto qkv = inputs.slice(0, inputs.size() - ctx->saved_data.size());
    const bool varlen = arguments.tensor("cu_seqlens_q").defined() || arguments.tensor("cu_seqlens_k").defined();
    const auto [q, k, v] = unpack(qkv, varlen);
    const auto rng_state = draw_rng_state(q, arguments["dropout_p"].toDouble());
    const auto results = call_forward(q, k, v, rng_state, arguments);
    save(ctx, inputs, {tensor_of(results.at(0)), tensor_of(results.at(1)), rng_state}, arguments);
    ctx->mark_non_differentiable({tensor_of(results.at(2))});
    ctx->set_materialize_grads(false);
    return {tensor_of(results.at(0)), tensor_of(results.at(1)), tensor_of(results.at(2))};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto inputs =
        at::TensorList(saved).slice(0, saved.size() - std::size(kSavedResults) - std::size(kSavedArguments));
    variable_list grads(inputs.size());
    if (const auto given = ctx->saved_data.find(kForwardOnly); given != ctx->saved_data.end()) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "flash_attn: ", given->second.toStringRef(),
                                  " has no backward pass; pass None, or call it under torch.no_grad()");
    }
    if (grad_outputs[0].defined() || grad_outputs[1].defined()) {
      Named arguments = ctx->saved_data;
      auto tensor = saved.begin() + static_cast<std::ptrdiff_t>(inputs.size());
      const auto restore = [&](const char* name) {
        if (const auto& given = *tensor++; given.defined()) arguments[name] = given;
      };
      for (const auto* name : kSavedResults) restore(name);
      for (const auto* name : kSavedArguments) restore(name);
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
  const auto op = find_operator(name);
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
  const auto results = AttentionFunction::apply(at::TensorList(inputs), arguments);
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
