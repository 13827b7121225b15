// CUDA's driver (libcuda), 12 or later. Functions and constants: NVIDIA's CUDA Driver API reference.
#include "hip/runtime/runtime.h"

namespace flash_attn::gpu {
namespace {

class CudaRuntime final : public GpuRuntime {
 public:
  explicit CudaRuntime(SharedLibrary library)
      : GpuRuntime(std::move(library), {"cuDriverGetVersion", "cuDeviceGetCount", "cuModuleLoadData",
                                        "cuModuleGetFunction", "cuLaunchKernel", "cuThreadExchangeStreamCaptureMode"}) {
    bind(init_, "cuInit");
    bind(get_device_, "cuDeviceGet");
    bind(get_attribute_, "cuDeviceGetAttribute");
    bind(retain_context_, "cuDevicePrimaryCtxRetain");
    bind(get_current_, "cuCtxGetCurrent");
    bind(set_current_, "cuCtxSetCurrent");
    bind(push_, "cuCtxPushCurrent_v2");
    bind(pop_, "cuCtxPopCurrent_v2");
    bind(set_function_attribute_, "cuFuncSetAttribute");
    bind(get_error_string_, "cuGetErrorString");
    check(init_(0), "cuInit");
  }

 private:
  const char* api_name() const override { return "CUDA"; }
  std::string error_text(Status status) const override {
    const char* text = nullptr;
    get_error_string_(status, &text);
    return text ? text : "unknown error";
  }

  GpuDevice query(int device) override {
    const auto attribute = [&](int which) {
      int value = 0;
      check(get_attribute_(&value, which, handle_of(device)),
            std::string("asking for the properties of GPU ") + std::to_string(device));
      return value;
    };
    // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR, _MULTIPROCESSOR_COUNT
    return {std::string("sm_") + std::to_string(attribute(75) * 10 + attribute(76)), "", attribute(16)};
  }

  int handle_of(int device) const {
    int handle = 0;
    check(get_device_(&handle, device), std::string("finding GPU ") + std::to_string(device));
    return handle;
  }

  // The primary context, which is torch's and the CUDA runtime's. A thread without one keeps it, as after a call of the
  // CUDA runtime.
  Handle enter(int device) override {
    const Handle context = context_of(device);
    Handle current = nullptr;
    check(get_current_(&current), "asking for the current GPU");
    if (current == context) return nullptr;
    check(current ? push_(context) : set_current_(context), std::string("selecting GPU ") + std::to_string(device));
    return current;
  }
  void leave(Handle previous) noexcept override {
    Handle context = nullptr;
    if (previous) pop_(&context);
  }

  Handle context_of(int device) {
    const std::lock_guard lock(contexts_mutex_);
    Handle& context = contexts_[device];
    if (!context)
      check(retain_context_(&context, handle_of(device)), std::string("the context of GPU ") + std::to_string(device));
    return context;
  }

  void allow_lds(Handle function, int bytes, const char* kernel) override {
    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; without it the limit is 48 KB.
    check(set_function_attribute_(function, 8, bytes), std::string("shared memory of kernel ") + kernel);
  }

  Status (*init_)(unsigned) = nullptr;
  Status (*get_device_)(int*, int) = nullptr;
  Status (*get_attribute_)(int*, int attribute, int device) = nullptr;
  Status (*retain_context_)(Handle*, int) = nullptr;
  Status (*get_current_)(Handle*) = nullptr;
  Status (*set_current_)(Handle) = nullptr;
  Status (*push_)(Handle) = nullptr;
  Status (*pop_)(Handle*) = nullptr;
  Status (*set_function_attribute_)(Handle, int attribute, int value) = nullptr;
  Status (*get_error_string_)(Status, const char**) = nullptr;
  std::mutex contexts_mutex_;
  std::map<int, Handle> contexts_;
};

}  // namespace

std::unique_ptr<GpuRuntime> make_cuda_runtime(SharedLibrary library) {
  return std::make_unique<CudaRuntime>(std::move(library));
}

}  // namespace flash_attn::gpu
