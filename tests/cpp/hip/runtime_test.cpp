// Opening runtimes: what is said when it fails. Launching is tested through the simulator, from Python.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "flash_attn/gpu.h"
#include "hip/runtime/shared_library.h"

namespace flash_attn {
namespace {

template <class Call>
std::string message(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Runtime, AMissingLibraryIsNamedWithTheVariable) {
  const std::string text = message([] { open_gpu_runtime(GpuApi::hip, "/nowhere/libamdhip64.so"); });
  EXPECT_NE(text.find("/nowhere/libamdhip64.so"), std::string::npos) << text;
  EXPECT_NE(text.find("FLASH_ATTN_HIP_LIBRARY"), std::string::npos) << text;
  const std::string cuda = message([] { open_gpu_runtime(GpuApi::cuda, "/nowhere/libcuda.so.1"); });
  EXPECT_NE(cuda.find("FLASH_ATTN_CUDA_LIBRARY"), std::string::npos) << cuda;
}

TEST(Runtime, ABrokenLibraryIsReportedAndCanBeReplaced) {
  const std::string path = testing::TempDir() + "libamdhip64_broken.so";
  std::ofstream(path) << "not a library";
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::string text = message([&] { open_gpu_runtime(GpuApi::hip, path); });
    EXPECT_NE(text.find(path), std::string::npos) << text;
  }
  std::remove(path.c_str());
}

class LibraryTest : public ::testing::Test {
 protected:
  // A library that every program on glibc can load, whatever it is linked to.
  void SetUp() override {
    if (!libm_) GTEST_SKIP() << "no libm.so.6 on this system: " << why_;
  }

 private:
  std::string why_;
  const gpu::SharedLibrary libm_ = gpu::SharedLibrary::open("libm.so.6", why_);
};

TEST_F(LibraryTest, WithoutTheFunctionsIsNamed) {
  const std::string text = message([] { open_gpu_runtime(GpuApi::hip, "libm.so.6"); });
  EXPECT_NE(text.find("hipRuntimeGetVersion"), std::string::npos) << text;
}

TEST_F(LibraryTest, IsFoundByItsNameWhereItIsLoaded) {
  EXPECT_FALSE(gpu::loaded_libraries("libm.").empty());
  EXPECT_TRUE(gpu::loaded_libraries("libnobody").empty());
}

TEST(Backend, AGpuProblemNeedsAQueue) {
  float data[64] = {};
  TensorView q{data, DType::f32, Device::gpu, 4, {1, 1, 1, 64}, {64, 64, 64, 1}};
  float lse[1];
  ForwardArgs args;
  args.problem.q = args.problem.k = args.problem.v = args.out = q;
  args.lse = {lse, DType::f32, Device::gpu, 3, {1, 1, 1, 0}, {1, 1, 1, 0}};
  const std::string text = message([&] { attention_forward(args, Executor{}); });
  EXPECT_NE(text.find("gpu_runtime"), std::string::npos) << text;
}

}  // namespace
}  // namespace flash_attn
