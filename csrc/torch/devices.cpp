#include "devices.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <flash_attn/gpu.h>

#include <atomic>

namespace flash_attn::torch_binding {
namespace {

/// The simulated runtime that stands in for the CPU, or null.
std::atomic<GpuRuntime*> simulation{nullptr};

/// A newer torch tells C++ the stream of the device's own interface; else only Python knows it.
template <class Stream>
void* native_stream(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    py::gil_scoped_acquire gil;
    const auto handle = py::module_::import("torch._C").attr("_cuda_getCurrentRawStream")(stream.device_index());
    return reinterpret_cast<void*>(handle.template cast<std::uintptr_t>());
  }
}

GpuQueue queue_of(const at::Device& device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  GpuQueue queue;
  queue.runtime = &gpu_runtime();
  queue.device = device.index();
  queue.stream = native_stream(guard.getStream(device));
  return queue;
}

void start_simulation(const std::string& library, const std::string& target, const std::string& schedule,
                      std::uint64_t seed, const std::string& checks, int threads) {
  GpuRuntime& runtime = open_gpu_runtime(GpuApi::hip, library);
  configure_simulation(runtime, {target, schedule, seed, checks, threads});
  simulation.store(&runtime);
}

py::list list_code_objects() {
  py::list all;
  for (const CodeObject& object : code_objects()) {
    py::dict entry;
    entry["target"] = object.target, entry["name"] = object.name;
    entry["bytes"] = object.bytes, entry["stored_bytes"] = object.stored_bytes;
    all.append(entry);
  }
  return all;
}

py::bytes code_object_bytes(const std::string& target, const std::string& name) {
  const std::vector<std::byte> bytes = code_object(target, name);
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

py::list list_gpus() {
  py::list all;
  GpuRuntime& runtime = gpu_runtime();
  for (int i = 0; i < gpu_device_count(runtime); ++i) {
    const GpuDevice device = gpu_device(runtime, i);
    py::dict entry;
    entry["target"] = device.target, entry["runtime"] = device.runtime;
    entry["multiprocessors"] = device.multiprocessors;
    all.append(entry);
  }
  return all;
}

}  // namespace

void check_device(const at::Device& device, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      device.is_cpu() || device.is_cuda(), "flash_attn: ", name, " is on ", device,
      ", for which this build has no backend; move the tensors to one of: cpu, cuda (NVIDIA's GPUs, "
      "and AMD's under a ROCm build of torch)");
}

Device core_device(const at::Device& device) {
  return device.is_cuda() || simulation.load(std::memory_order_relaxed) ? Device::gpu : Device::cpu;
}

Executor executor_for(const at::Device& device) {
  Executor executor;
  if (device.is_cuda()) {
    executor.gpu = queue_of(device);
    return executor;
  }
  executor.gpu.runtime = simulation.load(std::memory_order_relaxed);
  executor.num_threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  executor.waits_awake = true;
  executor.run = [](void*, int n, void (*body)(void* arg, int worker), void* arg) {
    at::parallel_for(0, n, 1, [=](std::int64_t begin, std::int64_t end) {
      for (auto worker = begin; worker < end; ++worker) body(arg, static_cast<int>(worker));
    });
  };
  return executor;
}

CallExecutor::CallExecutor(const at::Device& device) : device_(device), executor_(executor_for(device)) {
  executor_.gpu.scratch_context = this;
  executor_.gpu.scratch = [](void* context, std::int64_t bytes) -> void* {
    auto& self = *static_cast<CallExecutor*>(context);
    self.lent_.push_back(at::empty({bytes}, at::TensorOptions(self.device_).dtype(at::kByte)));
    return self.lent_.back().data_ptr();
  };
}

void define_gpu_functions(py::module_& m) {
  using py::arg;
  m.def("_start_simulation", &start_simulation,
        "From now on CPU tensors are computed by that simulated GPU, through the GPU backend.", arg("library"),
        arg("target"), arg("schedule"), arg("seed"), arg("checks"), arg("threads"));
  m.def("_stop_simulation", [] { simulation.store(nullptr); }, "CPU tensors are computed on the CPU again.");
  m.def("_code_objects", &list_code_objects, "GPU code in this build: target, name, bytes, stored_bytes.");
  m.def("_code_object", &code_object_bytes, "What a GPU of that target runs, an ELF file.", arg("target"), arg("name"));
  m.def("_missing_code_objects", &missing_code_objects, "Why there is no GPU code; empty when there is.");
  m.def("_gpus", &list_gpus, "GPUs of this process: target, runtime, multiprocessors. Opens the runtime.");
}

}  // namespace flash_attn::torch_binding
