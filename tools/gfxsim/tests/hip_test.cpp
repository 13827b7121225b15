// libamdhip64.so as a program uses it that knows only HIP's functions: opened by name, nothing linked.
#include <dlfcn.h>

#include <numeric>

#include "harness.h"

namespace gfxsim::testing {
namespace {

struct Buffer {
  const void* data;
  unsigned long long bytes;
  int writable;
  const char* name;
};

// hipError_t values, from the HIP API reference.
constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidConfiguration = 9, kInvalidDevice = 101, kInvalidImage = 200,
              kNoBinaryForGpu = 209, kInvalidHandle = 400, kNotFound = 500, kLaunchFailure = 719;

class Hip : public ::testing::TestWithParam<std::string> {
 protected:
  Hip() : library_(dlopen(GFXSIM_HIP_LIBRARY, RTLD_NOW | RTLD_LOCAL)) {
    if (!library_) throw std::runtime_error(dlerror());
    EXPECT_EQ(configure("random", "all"), 0) << message();
    set_buffers({});
  }
  template <class Signature>
  Signature* function(const char* name) const {
    auto* found = reinterpret_cast<Signature*>(dlsym(library_, name));
    if (!found) throw std::runtime_error(std::string("no function ") + name);
    return found;
  }
  int configure(const char* schedule, const char* checks) const {
    return function<int(const char*, const char*, unsigned long long, const char*, int)>("gfxsim_configure")(
        GetParam().c_str(), schedule, 7, checks, 1);
  }
  void set_buffers(const std::vector<Buffer>& buffers) const {
    function<void(const Buffer*, int)>("gfxsim_set_buffers")(buffers.data(), int(buffers.size()));
  }
  std::string message() const { return function<const char*()>("gfxsim_last_message")(); }
  int last_error() const { return function<int()>("hipGetLastError")(); }
  int load(void** module, const std::string& name, const std::string& target) const {
    // An exact copy, so that reading past the image's end is found by a sanitizer.
    const std::vector<std::byte> image = read_code_object(name, target);
    return function<int(void**, const void*)>("hipModuleLoadData")(module, image.data());
  }
  int unload(void* module) const { return function<int(void*)>("hipModuleUnload")(module); }
  int find(void** kernel, void* module, const char* name) const {
    return function<int(void**, void*, const char*)>("hipModuleGetFunction")(kernel, module, name);
  }
  int launch(void* kernel, unsigned grid, unsigned block, void** params, void** extra = nullptr) const {
    using Launch =
        int(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    return function<Launch>("hipModuleLaunchKernel")(kernel, grid, 1, 1, block, 1, 1, 0, nullptr, params, extra);
  }
  void* kernel(const char* object, const char* name) const {
    void *module = nullptr, *found = nullptr;
    EXPECT_EQ(load(&module, object, GetParam()), kSuccess) << message();
    EXPECT_EQ(find(&found, module, name), kSuccess) << message();
    return found;
  }
  std::string other_target() const { return GetParam() == "gfx942" ? "gfx1201" : "gfx942"; }

 private:
  void* library_;  // stays open, as a runtime does
};
INSTANTIATE_TEST_SUITE_P(Targets, Hip, ::testing::Values("gfx942", "gfx1201"));

TEST_P(Hip, DescribesTheDevice) {
  int value = 0;
  EXPECT_EQ(function<int(unsigned)>("hipInit")(0), kSuccess);
  EXPECT_EQ(function<int(int*)>("hipGetDeviceCount")(&value), kSuccess);
  EXPECT_EQ(value, 1);
  EXPECT_EQ(function<int(int*)>("hipGetDevice")(&value), kSuccess);
  EXPECT_EQ(value, 0);
  EXPECT_EQ(function<int(int*)>("hipRuntimeGetVersion")(&value), kSuccess);
  EXPECT_GE(value, 60000000);
  EXPECT_EQ(function<int(int)>("hipSetDevice")(1), kInvalidDevice);
  EXPECT_NE(message().find("device 1"), std::string::npos) << message();
  const auto attribute = function<int(int*, int, int)>("hipDeviceGetAttribute");
  EXPECT_EQ(attribute(&value, 87, 0), kSuccess);
  EXPECT_EQ(value, GetParam() == "gfx942" ? 64 : 32);
  EXPECT_EQ(attribute(&value, 74, 0), kSuccess);
  EXPECT_EQ(value, 65536);
  EXPECT_EQ(attribute(&value, 12345, 0), kInvalidValue);
  char properties[1472];
  EXPECT_EQ(function<int(void*, int)>("hipGetDevicePropertiesR0600")(properties, 0), kSuccess);
  EXPECT_EQ(std::string(properties + 1160).substr(0, GetParam().size()), GetParam());
  EXPECT_NE(std::string(properties).find("gfxsim"), std::string::npos);
  std::memcpy(&value, properties + 308, sizeof value);
  EXPECT_EQ(value, GetParam() == "gfx942" ? 64 : 32);
}

TEST_P(Hip, RunsAKernelOnCallersBuffers) {
  void* const add = kernel("basic", "vector_add");
  std::vector<float> a(300), b(300), c(300);
  std::iota(a.begin(), a.end(), 0.0f), std::iota(b.begin(), b.end(), 5.0f);
  // The same memory twice, as views of a packed tensor give it, and once as read-only.
  set_buffers(
      {{a.data(), 1200, 0, "a"}, {b.data(), 800, 0, "b"}, {b.data() + 100, 800, 1, "b too"}, {c.data(), 1200, 1, "c"}});
  float *pa = a.data(), *pb = b.data(), *pc = c.data();
  int n = 300;
  void* params[] = {&pa, &pb, &pc, &n};
  const auto launches = function<unsigned long long()>("gfxsim_launches");
  const auto instructions = function<unsigned long long()>("gfxsim_instructions");
  const unsigned long long launched = launches(), executed = instructions();
  ASSERT_EQ(launch(add, 2, 256, params), kSuccess) << message();
  EXPECT_EQ(launches(), launched + 1);
  EXPECT_GT(instructions(), executed);
  for (std::size_t i = 0; i < 300; ++i) ASSERT_EQ(c[i], a[i] + b[i]);

  struct {
    float *a, *b, *c;
    int n;
  } block{pa, pb, pa, 300};
  std::size_t bytes = sizeof block;
  void* extra[] = {reinterpret_cast<void*>(1), &block, reinterpret_cast<void*>(2), &bytes, reinterpret_cast<void*>(3)};
  EXPECT_EQ(launch(add, 2, 256, nullptr, extra), kLaunchFailure);  // a is read-only
  EXPECT_NE(message().find("'a'"), std::string::npos) << message();
  block.c = pc;
  EXPECT_EQ(launch(add, 2, 256, nullptr, extra), kSuccess) << message();
  EXPECT_EQ(launch(add, 2, 256, params, extra), kInvalidValue);
}

TEST_P(Hip, RunsAKernelOnDeviceMemory) {
  void* const add = kernel("basic", "vector_add");
  const auto allocate = function<int(void**, std::size_t)>("hipMalloc");
  const auto release = function<int(void*)>("hipFree");
  void* memory[3];
  for (void*& pointer : memory) ASSERT_EQ(allocate(&pointer, 400), kSuccess);
  std::vector<float> in(100, 1.5f), out(100);
  EXPECT_EQ(function<int(void*, const void*, std::size_t, int)>("hipMemcpy")(memory[0], in.data(), 400, 1), kSuccess);
  EXPECT_EQ(function<int(void*, int, std::size_t, void*)>("hipMemsetAsync")(memory[1], 0, 400, nullptr), kSuccess);
  void* stream = nullptr;
  EXPECT_EQ(function<int(void**)>("hipStreamCreate")(&stream), kSuccess);
  int n = 100;
  void* params[] = {&memory[0], &memory[1], &memory[2], &n};
  EXPECT_EQ(launch(add, 1, 256, params), kSuccess) << message();
  EXPECT_EQ(function<int(void*)>("hipStreamSynchronize")(stream), kSuccess);
  EXPECT_EQ(function<int(void*)>("hipStreamDestroy")(stream), kSuccess);
  EXPECT_EQ(function<int(void*, const void*, std::size_t, int)>("hipMemcpy")(out.data(), memory[2], 400, 2), kSuccess);
  EXPECT_EQ(out, in);
  for (void* pointer : memory) EXPECT_EQ(release(pointer), kSuccess);
  EXPECT_EQ(launch(add, 1, 256, params), kLaunchFailure);  // freed
  EXPECT_EQ(release(memory[0]), kInvalidValue);
  EXPECT_EQ(release(nullptr), kSuccess);
}

TEST_P(Hip, RefusesImages) {
  void* module = nullptr;
  EXPECT_EQ(load(&module, "basic", other_target()), kNoBinaryForGpu);
  EXPECT_NE(message().find(other_target()), std::string::npos) << message();
  EXPECT_NE(message().find(GetParam()), std::string::npos) << message();
  EXPECT_EQ(last_error(), kNoBinaryForGpu);
  EXPECT_EQ(last_error(), kSuccess);
  const std::vector<char> junk(64, 'x');
  EXPECT_EQ(function<int(void**, const void*)>("hipModuleLoadData")(&module, junk.data()), kInvalidImage);
  EXPECT_EQ(function<int(void**, const void*)>("hipModuleLoadData")(&module, nullptr), kInvalidValue);
}

TEST_P(Hip, RefusesHandles) {
  void *module = nullptr, *found = nullptr;
  ASSERT_EQ(load(&module, "basic", GetParam()), kSuccess) << message();
  EXPECT_EQ(find(&found, module, "no_such_kernel"), kNotFound);
  EXPECT_NE(message().find("no_such_kernel"), std::string::npos);
  EXPECT_NE(message().find("vector_add"), std::string::npos) << message();
  ASSERT_EQ(find(&found, module, "vector_add"), kSuccess);
  EXPECT_EQ(launch(found, 1, 256, nullptr), kInvalidValue);
  EXPECT_EQ(launch(found, 0, 256, nullptr), kInvalidConfiguration);
  EXPECT_EQ(unload(module), kSuccess);
  EXPECT_EQ(unload(module), kInvalidHandle);
  EXPECT_EQ(find(&found, module, "vector_add"), kInvalidHandle);
  EXPECT_EQ(launch(found, 1, 256, nullptr), kInvalidHandle);
}

TEST_P(Hip, FindingsAreLaunchFailures) {
  void* const faulty = kernel("faults", "reads_past_end");
  std::vector<float> x(100), out(101);
  set_buffers({{x.data(), 400, 0, "x"}, {out.data(), 404, 1, "out"}});
  float *px = x.data(), *pout = out.data();
  int n = 100;
  void* params[] = {&px, &pout, &n};
  EXPECT_EQ(configure("in-order", "undefined,races,waits,barriers"), 0) << message();
  EXPECT_EQ(launch(faulty, 1, 256, params), kLaunchFailure);
  for (const char* part : {"out-of-bounds", "reads_past_end", "wave", "lane", "'x'", "global_load"})
    EXPECT_NE(message().find(part), std::string::npos) << part << " is not in: " << message();
  EXPECT_EQ(last_error(), kLaunchFailure);
  EXPECT_STREQ(function<const char*(int)>("hipGetErrorName")(kLaunchFailure), "hipErrorLaunchFailure");
  EXPECT_STREQ(function<const char*(int)>("hipGetErrorString")(kSuccess), "no error");
}

TEST_P(Hip, ConfigureNamesWhatItAccepts) {
  const auto refused = [&](const char* schedule, const char* checks, const std::string& passed) {
    EXPECT_NE(configure(schedule, checks), 0);
    EXPECT_NE(message().find(passed), std::string::npos) << message();
  };
  refused("sideways", "all", "sideways");
  refused("random", "everything", "everything");
  EXPECT_NE(function<int(const char*, const char*, unsigned long long, const char*, int)>("gfxsim_configure")(
                "gfx803", "random", 0, "all", 1),
            0);
  EXPECT_NE(message().find("gfx942"), std::string::npos) << message();
}

}  // namespace
}  // namespace gfxsim::testing
