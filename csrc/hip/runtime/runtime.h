// A GPU runtime: devices, modules, launches. HIP's and CUDA's driver interfaces agree in everything that is needed here
// but names, error texts, and how a device is made current; runtime.cpp is what they share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "flash_attn/gpu.h"
#include "hip/manifest.h"
#include "hip/runtime/shared_library.h"

namespace flash_attn {

class GpuRuntime {
 public:
  // Memory that a launch may touch; only simulated runtimes ask for it.
  struct Buffer {  // The layout of gfxsim_buffer, tools/gfxsim/hip.
    const void* data;
    unsigned long long bytes;
    int writable;
    const char* name;
  };

  virtual ~GpuRuntime() = default;
  GpuRuntime(const GpuRuntime&) = delete;
  GpuRuntime& operator=(const GpuRuntime&) = delete;

  const std::string& path() const { return library_.path(); }
  std::string description() const { return std::string(api_name()) + " " + std::to_string(version_) + ", " + path(); }
  int device_count();
  // The device's target and size, asked once.
  const GpuDevice& device(int index);
  bool simulated() const { return configure_ != nullptr; }
  void configure(const Simulation& simulation);
  void set_buffers(std::span<const Buffer> buffers);

  // Launches `row`'s kernel with one struct of arguments. Loads its code object on first use. Throws Error.
  void launch(const gpu::KernelRow& row, const GpuQueue& queue, std::uint32_t blocks, const void* args);

 protected:
  using Status = int;
  using Handle = void*;

  // What the shared functions are called in the library.
  struct Names {
    const char *get_version, *get_count, *load, *get_function, *launch, *exchange_capture_mode;
  };
  GpuRuntime(gpu::SharedLibrary library, const Names& names);

  // Throws Error when the library lacks the function.
  template <class Function>
  void bind(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(symbol(name));
  }
  void check(Status status, const std::string& what) const;

  virtual const char* api_name() const = 0;
  virtual std::string error_text(Status status) const = 0;
  virtual GpuDevice query(int device) = 0;
  // Makes `device` current for this thread; leave() undoes it, by what enter() returned.
  virtual Handle enter(int device) = 0;
  virtual void leave(Handle previous) noexcept = 0;
  virtual void allow_lds(Handle function, int bytes, const char* kernel) = 0;

  gpu::SharedLibrary library_;
  int version_ = 0;

 private:
  class Current;
  void* symbol(const char* name) const;
  Handle function_of(const gpu::KernelRow& row, int device);
  Handle module_of(const std::string& target, const char* object, int device);
  std::string last_message() const { return last_message_ ? last_message_() : ""; }

  Status (*get_count_)(int*) = nullptr;
  Status (*load_)(Handle* module, const void* image) = nullptr;
  Status (*get_function_)(Handle* function, Handle module, const char* name) = nullptr;
  Status (*launch_)(Handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                    unsigned lds, void* stream, void** args, void** extra) = nullptr;
  Status (*exchange_capture_mode_)(int* mode) = nullptr;
  int (*configure_)(const char*, const char*, unsigned long long, const char*, int) = nullptr;
  Status (*unload_simulated_)(Handle module) = nullptr;
  void (*set_buffers_)(const Buffer*, int) = nullptr;
  const char* (*last_message_)() = nullptr;

  std::mutex mutex_;
  std::string simulated_target_;
  std::map<int, GpuDevice> devices_;
  std::map<std::pair<int, std::string>, Handle> modules_;
  std::map<std::pair<int, const gpu::KernelRow*>, Handle> functions_;
};

namespace gpu {
std::unique_ptr<GpuRuntime> make_hip_runtime(SharedLibrary library);
std::unique_ptr<GpuRuntime> make_cuda_runtime(SharedLibrary library);
}  // namespace gpu

}  // namespace flash_attn
