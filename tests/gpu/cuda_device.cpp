// Kernels on an NVIDIA GPU, from cubins.
#include <cuda_runtime.h>

#include <map>
#include <stdexcept>

#include "device.h"

namespace flash_attn::testing {
namespace {

void check(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) throw std::runtime_error(what + ": " + cudaGetErrorString(status));
}

class CudaDevice final : public KernelDevice {
 public:
  explicit CudaDevice(std::string directory) : directory_(std::move(directory)) {}

  gpu::Target target() const override { return gpu::Target::cuda; }
  void* allocate(std::size_t bytes) override {
    void* p = nullptr;
    check(cudaMalloc(&p, bytes), "cudaMalloc");
    return p;
  }
  void release(void* p) override { cudaFree(p); }
  void upload(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "upload");
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "download");
  }

  float launch(const gpu::KernelRow& row, unsigned blocks, const void* args, std::size_t, int repeats) override {
    const cudaKernel_t kernel = find(row);
    void* pointers[] = {const_cast<void*>(args)};
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    check(cudaEventRecord(begin), "event");
    for (int i = 0; i < repeats; ++i)
      check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(unsigned(row.threads())),
                             pointers, std::size_t(row.lds_bytes()), nullptr),
            std::string("launch of ") + row.name);
    check(cudaEventRecord(end), "event");
    check(cudaDeviceSynchronize(), std::string("run of ") + row.name);
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "event");
    return ms / float(repeats);
  }

 private:
  cudaKernel_t find(const gpu::KernelRow& row) {
    auto& kernel = kernels_[row.name];
    if (kernel) return kernel;
    cudaLibrary_t& library = libraries_[gpu::object_name(row.family)];
    const std::string path = directory_ + "/" + gpu::object_name(row.family) + ".cubin";
    if (!library)
      check(cudaLibraryLoadFromFile(&library, path.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0),
            "loading " + path);
    check(cudaLibraryGetKernel(&kernel, library, row.name), std::string("kernel ") + row.name);
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               row.lds_bytes()),
          std::string("shared memory of ") + row.name);
    return kernel;
  }

  std::string directory_;
  std::map<std::string, cudaLibrary_t> libraries_;
  std::map<std::string, cudaKernel_t> kernels_;
};

}  // namespace

std::unique_ptr<KernelDevice> open_device(const std::string& directory) {
  return std::make_unique<CudaDevice>(directory);
}

}  // namespace flash_attn::testing
