// A shorter way from Python to an operator than torch.ops takes, for calls whose arguments are plain.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace flash_attn::torch_binding {

void define_plain_calls(py::module_& m);

}  // namespace flash_attn::torch_binding
