// Which library is opened, and what is said when none can be.
#include <cstdlib>

#include "hip/runtime/runtime.h"

namespace flash_attn {
namespace {

struct Api {
  GpuApi api;
  const char *name, *variable, *stem;
  std::vector<const char*> library_names;
  std::unique_ptr<GpuRuntime> (*make)(gpu::SharedLibrary);
};

const Api& table(GpuApi api) {
  static const Api cuda{GpuApi::cuda, "CUDA",           "FLASH_ATTN_CUDA_LIBRARY",
                        "libcuda.so", {"libcuda.so.1"}, gpu::make_cuda_runtime};
  static const Api hip{
      GpuApi::hip,
      "HIP",
      "FLASH_ATTN_HIP_LIBRARY",
      "libamdhip64",
      {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"},
      gpu::make_hip_runtime};
  return api == GpuApi::hip ? hip : cuda;
}

// Opened libraries by path. Never closed, and never destroyed: their threads outlive main.
GpuRuntime* open_library(const Api& api, const std::string& path, std::string& tried) {
  static std::mutex mutex;
  static auto& opened = *new std::map<std::string, std::unique_ptr<GpuRuntime>>();
  const std::lock_guard lock(mutex);
  std::unique_ptr<GpuRuntime>& runtime = opened[path];
  if (runtime) return runtime.get();
  std::string why;
  gpu::SharedLibrary library = gpu::SharedLibrary::open(path, why);
  if (library) runtime = api.make(std::move(library));
  if (!runtime) tried += "\n  " + path + ": " + why;
  return runtime.get();
}

// The copy that the process has loaded. A simulated runtime is opened by tests beside it and never meant.
GpuRuntime* open_loaded(const Api& api, std::string& tried) {
  for (const std::string& path : gpu::loaded_libraries(api.stem)) {
    GpuRuntime* const runtime = open_library(api, path, tried);
    if (runtime && !runtime->simulated()) return runtime;
  }
  return nullptr;
}

GpuRuntime* open_any(std::string& tried) {
  for (const GpuApi api : {GpuApi::cuda, GpuApi::hip}) {
    const Api& entry = table(api);
    if (const char* path = std::getenv(entry.variable); path && *path) return &open_gpu_runtime(api, path);
  }
  for (const GpuApi api : {GpuApi::cuda, GpuApi::hip})
    if (GpuRuntime* runtime = open_loaded(table(api), tried)) return runtime;
  for (const GpuApi api : {GpuApi::hip, GpuApi::cuda})
    for (const char* name : table(api).library_names)
      if (GpuRuntime* runtime = open_library(table(api), name, tried)) return runtime;
  return nullptr;
}

}  // namespace

GpuRuntime& open_gpu_runtime(GpuApi api, const std::string& library) {
  const Api& entry = table(api);
  std::string tried;
  if (GpuRuntime* runtime = open_library(entry, library, tried)) return *runtime;
  throw Error(std::string("flash_attn: no ") + entry.name + " runtime could be opened; tried:" + tried + "\nSet " +
              entry.variable + " to the path of " + entry.library_names.front());
}

GpuRuntime& gpu_runtime() {
  static std::mutex mutex;
  static GpuRuntime* runtime = nullptr;
  const std::lock_guard lock(mutex);
  if (runtime) return *runtime;
  std::string tried;
  runtime = open_any(tried);
  if (runtime) return *runtime;
  throw Error("flash_attn: no GPU runtime could be opened; tried:" + tried +
              "\nInstall ROCm's HIP runtime (libamdhip64) or NVIDIA's driver, or set FLASH_ATTN_HIP_LIBRARY or "
              "FLASH_ATTN_CUDA_LIBRARY to the library's path");
}

}  // namespace flash_attn
