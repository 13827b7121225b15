// HIP (libamdhip64), ROCm 5 to 7. Functions and constants: AMD's HIP API reference.
#include <cctype>

#include "hip/runtime/runtime.h"

namespace flash_attn::gpu {
namespace {

class HipRuntime final : public GpuRuntime {
 public:
  explicit HipRuntime(SharedLibrary library)
      : GpuRuntime(std::move(library),
                   {"hipRuntimeGetVersion", "hipGetDeviceCount", "hipModuleLoadData", "hipModuleGetFunction",
                    "hipModuleLaunchKernel", "hipThreadExchangeStreamCaptureMode"}) {
    bind(get_device_, "hipGetDevice");
    bind(set_device_, "hipSetDevice");
    bind(get_attribute_, "hipDeviceGetAttribute");
    bind(get_error_string_, "hipGetErrorString");
    bind(get_last_error_, "hipGetLastError");
    // Since ROCm 6 the plain name is what programs compiled for ROCm 5 use.
    const char* const current = "hipGetDevicePropertiesR0600";
    bind(get_properties_, library_.find(current) ? current : "hipGetDeviceProperties");
  }

 private:
  const char* api_name() const override { return "HIP"; }
  // HIP keeps a failure for hipGetLastError, which torch asks after launches of its own: it is ours to take away.
  std::string error_text(Status status) const override {
    get_last_error_();
    return get_error_string_(status);
  }

  GpuDevice query(int device) override {
    GpuDevice result;
    result.target = target_name(device);
    // hipDeviceAttributeMultiprocessorCount: 63 since ROCm 5.
    check(get_attribute_(&result.multiprocessors, 63, device), "asking for the number of compute units");
    return result;
  }

  // The struct's layout differs between releases, so its text is searched for: gcnArchName, such as
  // "gfx942:sramecc+:xnack-", is the last of its strings.
  std::string target_name(int device) const {
    static constexpr std::size_t kMoreThanAnyRelease = 8192;
    std::string bytes(kMoreThanAnyRelease, '\0');
    check(get_properties_(bytes.data(), device),
          std::string("asking for the properties of GPU ") + std::to_string(device));
    const auto at = bytes.rfind("gfx");
    if (at == std::string::npos)
      throw Error("flash_attn: " + description() + " does not tell the architecture of GPU " + std::to_string(device) +
                  "; update ROCm, or move the tensors to the CPU");
    std::size_t end = at + 3;
    while (std::isalnum(static_cast<unsigned char>(bytes[end]))) ++end;
    return bytes.substr(at, end - at);
  }

  Handle enter(int device) override {
    int previous = 0;
    check(get_device_(&previous), "asking for the current GPU");
    if (previous != device) check(set_device_(device), std::string("selecting GPU ") + std::to_string(device));
    return reinterpret_cast<Handle>(static_cast<std::intptr_t>(previous));
  }
  void leave(Handle previous) noexcept override { set_device_(int(reinterpret_cast<std::intptr_t>(previous))); }
  void allow_lds(Handle, int, const char*) override {}

  Status (*get_device_)(int*) = nullptr;
  Status (*set_device_)(int) = nullptr;
  Status (*get_last_error_)() = nullptr;
  Status (*get_attribute_)(int*, int attribute, int device) = nullptr;
  Status (*get_properties_)(void*, int device) = nullptr;
  const char* (*get_error_string_)(Status) = nullptr;
};

}  // namespace

std::unique_ptr<GpuRuntime> make_hip_runtime(SharedLibrary library) {
  return std::make_unique<HipRuntime>(std::move(library));
}

}  // namespace flash_attn::gpu
