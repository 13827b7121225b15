// Devices of tensors: which of the core's backends computes on one, and where its work is queued.
#pragma once

#include <ATen/core/Tensor.h>
#include <flash_attn/attention.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace flash_attn::torch_binding {

/// Raises NotImplementedError unless a backend computes on the device. torch calls AMD's GPUs cuda as well.
void check_device(const at::Device& device, const char* name);

/// The core's name for it: CPU tensors are on a GPU while a simulation is on, whose device memory is host memory.
Device core_device(const at::Device& device);

/// Threads of torch's intra-op pool, so that a process has one pool and torch.set_num_threads governs it; for a GPU its
/// runtime and torch's current stream.
Executor executor_for(const at::Device& device);

/// The same, for one call: lends memory of the device, which is kept until the call has been queued. What torch then
/// gives to others on that stream they use after it.
class CallExecutor {
 public:
  explicit CallExecutor(const at::Device& device);
  CallExecutor(const CallExecutor&) = delete;
  CallExecutor& operator=(const CallExecutor&) = delete;
  operator const Executor&() const { return executor_; }

 private:
  at::Device device_;
  std::vector<at::Tensor> lent_;
  Executor executor_;
};

/// Python's access to runtimes, code objects and simulations, as functions of `m`.
void define_gpu_functions(py::module_& m);

}  // namespace flash_attn::torch_binding
