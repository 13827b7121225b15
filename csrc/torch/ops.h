// What ops.cpp and autograd.cpp share: boxed kernels, which read their arguments by name.
#pragma once

#include "arguments.h"

namespace flash_attn::torch_binding {

/// Arguments of a call on shapes. One meta tensor is enough to get here; any other would give results without values.
Arguments meta_arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Raises: the operator has no torch.func transform.
void refuse_transform(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Whether gradients of some of these, which may be undefined, can be asked for.
bool needs_graph(at::TensorList inputs);

/// Autograd of the public operators.
void attention_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
/// Autograd of attention_backward: its own derivative does not exist.
void refuse_double_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace flash_attn::torch_binding
