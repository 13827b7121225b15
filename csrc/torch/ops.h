// What ops.cpp and autograd.cpp share: boxed kernels, which read their arguments by name.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "call.h"

namespace flash_attn::torch_binding {

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

/// Autograd of the public operators.
void attention_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack);
/// Autograd of attention_backward: its own derivative does not exist.
void refuse_double_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace flash_attn::torch_binding
