#include "hip/runtime/runtime.h"

#include <utility>

#include "hip/runtime/code_objects.h"

namespace flash_attn {

// A device made current for the scope.
class GpuRuntime::Current {
 public:
  Current(GpuRuntime& runtime, int device) : runtime_(runtime), previous_(runtime.enter(device)) {}
  ~Current() { runtime_.leave(previous_); }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  GpuRuntime& runtime_;
  Handle previous_;
};

GpuRuntime::GpuRuntime(gpu::SharedLibrary library, const Names& names) : library_(std::move(library)) {
  Status (*get_version)(int*) = nullptr;
  bind(get_version, names.get_version);
  bind(get_count_, names.get_count);
  bind(load_, names.load);
  bind(get_function_, names.get_function);
  bind(launch_, names.launch);
  const auto bind_optional = [this](auto*& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library_.find(name));
  };
  bind_optional(exchange_capture_mode_, names.exchange_capture_mode);
  bind_optional(configure_, "gfxsim_configure");
  bind_optional(unload_simulated_, "hipModuleUnload");
  bind_optional(set_buffers_, "gfxsim_set_buffers");
  bind_optional(last_message_, "gfxsim_last_message");
  get_version(&version_);
}

void* GpuRuntime::symbol(const char* name) const {
  if (void* address = library_.find(name)) return address;
  throw Error(
      std::string("flash_attn: ") + path() + " has no function " + name +
      ", so it is not the GPU runtime it was taken for; accepted: HIP of ROCm 5 or later, CUDA's driver 12 or later");
}

void GpuRuntime::check(Status status, const std::string& what) const {
  if (status == 0) return;
  const std::string more = last_message();
  throw Error(std::string("flash_attn: ") + what + " failed: " + error_text(status) + " (" + std::to_string(status) +
              ", " + description() + ")" + (more.empty() ? "" : "\n" + more));
}

int GpuRuntime::device_count() {
  int count = 0;
  check(get_count_(&count), "counting GPUs");
  return count;
}

const GpuDevice& GpuRuntime::device(int index) {
  const std::lock_guard lock(mutex_);
  if (const auto known = devices_.find(index); known != devices_.end()) return known->second;
  GpuDevice device = query(index);
  device.runtime = description();
  return devices_[index] = device;
}

void GpuRuntime::configure(const Simulation& s) {
  if (!configure_)
    throw Error(std::string("flash_attn: ") + path() + " is not a simulated runtime; it takes no simulation settings");
  const int status = configure_(s.target.c_str(), s.schedule.c_str(), s.seed, s.checks.c_str(), s.threads);
  if (status != 0) throw Error(std::string("flash_attn: ") + last_message());
  const std::lock_guard lock(mutex_);
  if (s.target == simulated_target_) return;
  // Another target needs other code objects. The simulator's decoded ones are large.
  simulated_target_ = s.target;
  for (const auto& [key, module] : modules_)
    if (module) unload_simulated_(module);
  devices_.clear();
  modules_.clear();
  functions_.clear();
}

void GpuRuntime::set_buffers(std::span<const Buffer> buffers) {
  if (set_buffers_) set_buffers_(buffers.data(), static_cast<int>(buffers.size()));
}

GpuRuntime::Handle GpuRuntime::module_of(const std::string& target, const char* object, int device) {
  Handle& module = modules_[{device, object}];
  if (module) return module;
  const std::vector<std::byte> image = gpu::unpack_code_object(target, object);
  // Loading allocates, which a stream that is being captured forbids to its thread unless the mode is relaxed (2).
  int mode = 2;
  if (exchange_capture_mode_) exchange_capture_mode_(&mode);
  const Status status = load_(&module, image.data());
  if (exchange_capture_mode_) exchange_capture_mode_(&mode);
  if (status != 0) module = nullptr;
  check(status, std::string("loading the code object ") + object + " for " + target);
  return module;
}

GpuRuntime::Handle GpuRuntime::function_of(const gpu::KernelRow& row, int device) {
  const std::string target = this->device(device).target;
  const std::lock_guard lock(mutex_);
  Handle& function = functions_[{device, &row}];
  if (function) return function;
  const std::string embedded = gpu::embedded_target_for(target);
  const Handle module = module_of(embedded.empty() ? target : embedded, object_name(row.family), device);
  Handle found = nullptr;
  check(get_function_(&found, module, row.name), std::string("finding kernel ") + row.name + " for " + target);
  allow_lds(found, row.lds_bytes(), row.name);
  return function = found;
}

void GpuRuntime::launch(const gpu::KernelRow& row, const GpuQueue& queue, std::uint32_t blocks, const void* args) {
  const Current current(*this, queue.device);
  const Handle function = function_of(row, queue.device);
  void* pointers[] = {const_cast<void*>(args)};
  // AMD's kernels hold their LDS in the code object.
  const unsigned lds = row.target == gpu::Target::cuda ? unsigned(row.lds_bytes()) : 0;
  check(launch_(function, blocks, 1, 1, unsigned(row.threads()), 1, 1, lds, queue.stream, pointers, nullptr),
        std::string("launching kernel ") + row.name + " on " + device(queue.device).target);
}

int gpu_device_count(GpuRuntime& runtime) { return runtime.device_count(); }
GpuDevice gpu_device(GpuRuntime& runtime, int device) { return runtime.device(device); }
void configure_simulation(GpuRuntime& runtime, const Simulation& simulation) { runtime.configure(simulation); }

}  // namespace flash_attn
