// Derivative of the public operators: of out and softmax_lse, in q, k and v or their packed forms, attn_bias and
// learnable_sink. S_dmask is not differentiable.
//
// Forward and backward go through the operators attention_forward and attention_backward, which are pure: the dropout
// seed is drawn here and saved. So a compiler that traces this formula sees the draw, and forward, backward and
// recomputation share one mask.
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "ops.h"

namespace flash_attn::torch_binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Tensors saved for backward, after the inputs: what forward makes, then arguments.
constexpr Name kSavedResults[] = {"out", "softmax_lse", "rng_state"};
constexpr Name kSavedArguments[] = {"cu_seqlens_q", "cu_seqlens_k", "alibi_slopes",
                                    "attn_mask",    "key_begin",    "key_end"};

/// Differentiable arguments that may be missing, with what asks attention_backward for their gradients. Where given,
/// they follow q, k and v among the inputs of the formula.
constexpr struct {
  Name name, wanted;
} kExtraInputs[] = {{"attn_bias", "bias_gradient"}, {"learnable_sink", "sink_gradient"}};

/// Where the name of an argument without a backward pass is kept.
constexpr const char* kForwardOnly = "forward only";

/// What is kept for backward and no tensor: arguments of attention_backward, in its schema's order.
constexpr const char* kArguments = "arguments";

const c10::OperatorHandle& backward_operator() {
  static const auto op = find_operator("flash_attn::attention_backward");
  return op;
}

/// attention_forward with these tensors and what else `arguments` of a public operator has.
torch::jit::Stack call_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& rng_state, const Arguments& arguments) {
  static const auto op = find_operator("flash_attn::attention_forward");
  Outgoing forward(op);
  forward.set_all(arguments);
  forward.set("q", q), forward.set("k", k), forward.set("v", v);
  forward.set("rng_state", rng_state);
  return std::move(forward).call();
}

/// What a forward pass makes that backward reads.
struct Made {
  at::Tensor out, softmax_lse, rng_state;
};

/// Keeps what attention_backward takes of the arguments of a public operator. Only `inputs` are differentiated.
void save(AutogradContext* ctx, at::TensorList inputs, const Made& made, const Arguments& arguments) {
  variable_list saved = inputs.vec();
  saved.insert(saved.end(), {made.out, made.softmax_lse, made.rng_state});
  for (const Name name : kSavedArguments) saved.push_back(arguments.tensor(name));
  ctx->save_for_backward(std::move(saved));
  Outgoing backward(backward_operator());
  backward.set_all(arguments);
  for (const auto& extra : kExtraInputs) {
    const auto tensor = arguments.tensor(extra.name);
    backward[extra.wanted] = tensor.defined() ? c10::IValue(tensor.requires_grad()) : c10::IValue();
  }
  ctx->saved_data[kArguments] = backward.without_tensors();
  for (const Name name : {Name("block_table"), Name("leftpad_k"), Name("seqused_k")}) {
    if (arguments.tensor(name).defined()) ctx->saved_data[kForwardOnly] = std::string(name.text());
  }
}

/// attention_backward of what was saved; sets in `computed` which of the inputs get a gradient.
Outgoing restore(const AutogradContext& ctx, const variable_list& saved, std::vector<bool>& computed) {
  Outgoing backward(backward_operator(), ctx.saved_data.at(kArguments));
  const auto inputs =
      at::TensorList(saved).slice(0, saved.size() - std::size(kSavedResults) - std::size(kSavedArguments));
  auto next = saved.begin() + static_cast<std::ptrdiff_t>(inputs.size());
  for (const Name name : kSavedResults) backward.set(name, *next++);
  for (const Name name : kSavedArguments) backward.set(name, *next++);
  computed.assign(inputs.size(), true);
  std::size_t main = inputs.size();
  for (std::size_t n = std::size(kExtraInputs); n-- > 0;) {
    auto& wanted = backward[kExtraInputs[n].wanted];
    if (wanted.isNone()) {
      wanted = false;
      continue;
    }
    computed[--main] = wanted.toBool();
    backward.set(kExtraInputs[n].name, inputs[main]);
  }
  const auto qkv = inputs.slice(0, main);
  const bool varlen = backward["cu_seqlens_q"].isTensor() || backward["cu_seqlens_k"].isTensor();
  const auto [q, k, v] = unpack(qkv, varlen);
  backward.set("q", q), backward.set("k", k), backward.set("v", v);
  backward["packing"] = static_cast<std::int64_t>(packing_of(qkv));
  return backward;
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  /// `arguments`: those of a public operator. Returns out, softmax_lse. S_dmask, which has no gradient, is written to
  /// `s_dmask`: compiled autograd takes no function with a result that is marked so (torch 2.13 asserts it).
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const Arguments& arguments,
                               at::Tensor* s_dmask) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::size_t main = inputs.size();
    for (const auto& extra : kExtraInputs) main -= arguments[extra.name].isNone() ? 0 : 1;
    const auto qkv = inputs.slice(0, main);
    Call call = arguments.call();
    std::tie(call.q, call.k, call.v) = unpack(qkv, call.varlen());
    const auto rng_state = draw_rng_state(call);
    const auto results = call_forward(call.q, call.k, call.v, rng_state, arguments);
    const at::Tensor out = results.at(0).toTensor(), softmax_lse = results.at(1).toTensor();
    *s_dmask = results.at(2).toTensor();
    save(ctx, inputs, {out, softmax_lse, rng_state}, arguments);
    ctx->set_materialize_grads(false);
    return {out, softmax_lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    if (const auto given = ctx->saved_data.find(kForwardOnly); given != ctx->saved_data.end()) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, "flash_attn: ", given->second.toStringRef(),
                                  " has no backward pass; pass None, or call it under torch.no_grad()");
    }
    std::vector<bool> computed;
    Outgoing arguments = restore(*ctx, ctx->get_saved_variables(), computed);
    variable_list grads(computed.size());
    if (grad_outputs[0].defined() || grad_outputs[1].defined()) {
      arguments["dout"] = grad_outputs[0].defined() ? grad_outputs[0] : at::zeros_like(arguments["out"].toTensor());
      arguments.set("dlse", grad_outputs[1]);
      const auto results = std::move(arguments).call().at(0).toTensorVector();
      auto result = results.begin();
      for (std::size_t n = 0; n < computed.size(); ++n) {
        if (computed[n]) grads[n] = *result++;
      }
    }
    grads.resize(grads.size() + 2);  // No gradient for `arguments` and `s_dmask`.
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

}  // namespace

bool needs_graph(at::TensorList inputs) {
  return at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
           return input.defined() && input.requires_grad();
         });
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
  at::Tensor s_dmask;
  const auto results = AttentionFunction::apply(at::TensorList(inputs), arguments, &s_dmask);
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, results.at(0), results.at(1), std::move(s_dmask));
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
