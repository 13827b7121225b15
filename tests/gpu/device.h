// Where kernels of the manifest run in tests: memory and launches, nothing else.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "hip/manifest.h"

namespace flash_attn::testing {

// Every allocation begins and ends with this many bytes that no kernel may touch.
inline constexpr std::size_t kGuardBytes = 4096;

class KernelDevice {
 public:
  virtual ~KernelDevice() = default;
  virtual gpu::Target target() const = 0;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* p) = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
  // Throws std::runtime_error when the launch or the kernel fails. Returns milliseconds per launch.
  virtual float launch(const gpu::KernelRow& kernel, unsigned blocks, const void* args, std::size_t args_bytes,
                       int repeats) = 0;
};

// `directory` holds one code object per kernel family: forward.<suffix>, backward.<suffix>.
std::unique_ptr<KernelDevice> open_device(const std::string& directory);

}  // namespace flash_attn::testing
