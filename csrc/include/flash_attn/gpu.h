// GPUs for the C++ interface: opening a runtime, and where a call runs.
//
// The core is linked against no GPU library. HIP (libamdhip64) or CUDA's driver (libcuda) is opened at run time, the
// copy that the process has loaded already first, since two copies share neither streams nor memory.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "flash_attn/attention.h"

namespace flash_attn {

/// An opened runtime. One object per library file, kept until the process ends; safe for any number of threads.
class GpuRuntime;

enum class GpuApi : std::uint8_t { hip, cuda };

/// The runtime of this process: CUDA's where libcuda is loaded, HIP's where libamdhip64 is, else the first of the two
/// that can be opened. FLASH_ATTN_HIP_LIBRARY and FLASH_ATTN_CUDA_LIBRARY, where set, name the file. Throws Error with
/// what was tried.
FLASH_ATTN_API GpuRuntime& gpu_runtime();
/// The runtime in `library`, a path or a name that the system's loader finds.
FLASH_ATTN_API GpuRuntime& open_gpu_runtime(GpuApi api, const std::string& library);

struct GpuDevice {
  std::string target;   ///< such as "gfx942" or "sm_90"
  std::string runtime;  ///< such as "HIP 60342131, /opt/rocm/lib/libamdhip64.so.6"
  int multiprocessors = 0;
};
FLASH_ATTN_API int gpu_device_count(GpuRuntime& runtime);
FLASH_ATTN_API GpuDevice gpu_device(GpuRuntime& runtime, int device);

/// One of the code objects that this build carries.
struct CodeObject {
  std::string target, name;  ///< such as "gfx942", "forward"
  std::size_t bytes = 0, stored_bytes = 0;
};
FLASH_ATTN_API std::vector<CodeObject> code_objects();
/// The code object that a GPU of that target runs, an ELF file. Throws NotSupported when the build carries none.
FLASH_ATTN_API std::vector<std::byte> code_object(const std::string& target, const std::string& name);
/// Why the build carries no code objects; empty when it does.
FLASH_ATTN_API std::string missing_code_objects();

/// What the simulated runtime of tools/gfxsim takes: how waves are ordered, and which checks are on. Throws Error for
/// any other runtime, and when a value is not accepted.
struct Simulation {
  std::string target = "gfx942";
  std::string schedule = "in-order";  ///< in-order, round-robin or random
  std::uint64_t seed = 0;
  std::string checks = "all";
  int threads = 1;
};
FLASH_ATTN_API void configure_simulation(GpuRuntime& runtime, const Simulation& simulation);

}  // namespace flash_attn
