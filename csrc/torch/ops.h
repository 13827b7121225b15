// What ops.cpp and autograd.cpp share: boxed kernels, which read their arguments by name.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string_view>

#include "call.h"

namespace flash_attn::torch_binding {

/// Arguments on an operator's stack, found by the names in its schema, so that each argument list exists only there.
/// Finding them is quickest in the schema's order.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  /// None if the operator has no such argument.
  const c10::IValue& operator[](std::string_view name) const;
  /// Undefined for None.
  at::Tensor tensor(std::string_view name) const;
  /// The Call without q, k and v of a packed operator.
  Call call() const;
  Inputs inputs() const;

 private:
  const c10::FunctionSchema& schema_;
  const c10::IValue* first_;
  mutable std::size_t next_ = 0;  // After the argument that was found last.
};

/// Replaces an operator's arguments on the stack by its results.
template <class... Results>
void reply(torch::jit::Stack* stack, const c10::OperatorHandle& op, Results&&... results) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, std::forward<Results>(results)...);
}

/// Arguments of a call on shapes. One meta tensor is enough to get here; any other would give results without values.
Arguments meta_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Raises: the operator has no torch.func transform.
void refuse_transform(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Arguments by their names in a schema, as formulas of autograd keep them.
using Named = decltype(torch::autograd::AutogradContext::saved_data);
inline c10::IValue value_of(const at::Tensor& tensor) { return tensor.defined() ? c10::IValue(tensor) : c10::IValue(); }
inline at::Tensor tensor_of(const c10::IValue& value) { return value.isTensor() ? value.toTensor() : at::Tensor(); }
/// The results of an operator, called through the dispatcher; what `arguments` lacks is at its default.
torch::jit::Stack call_operator(const char* name, const Named& arguments);

/// Autograd of the public operators.
void attention_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
/// Autograd of attention_backward: its own derivative does not exist.
void refuse_double_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace flash_attn::torch_binding
