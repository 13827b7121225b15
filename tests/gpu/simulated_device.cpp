// Kernels on a simulated AMD GPU (tools/gfxsim), from the code objects that ship. Any report of the simulator fails the
// launch. At the end, one line per kernel on stderr: instructions and LDS bank conflicts.
//
//   cmake -G Ninja -S tools/gfxsim -B build/gfxsim && ninja -C build/gfxsim gfxsim
//   c++ -std=c++20 -O2 -Icsrc -Icsrc/include -Itests/cpp -Itests/gpu -Itools/gfxsim/include tests/gpu/kernel_check.cpp
//     tests/gpu/simulated_device.cpp build/gfxsim/libgfxsim.a $(llvm-config-22 --ldflags --libs) -o kernel_check
//   kernel_check build/kernels/gfx942 --only D=64
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>

#include "device.h"
#include "gfxsim/gfxsim.h"

namespace flash_attn::testing {
namespace {

class SimulatedDevice final : public KernelDevice {
 public:
  explicit SimulatedDevice(std::filesystem::path directory)
      : directory_(std::move(directory)), name_(directory_.filename().string()), device_(name_) {}
  ~SimulatedDevice() override {
    for (const auto& [kernel, s] : statistics_)
      std::fprintf(stderr, "%s %s: %llu instructions, %.1f %% of LDS clocks are bank conflicts\n", name_.c_str(),
                   kernel.c_str(), static_cast<unsigned long long>(s.instructions),
                   s.lds_clocks ? 100.0 * double(s.lds_conflict_clocks) / double(s.lds_clocks) : 0.0);
  }

  gpu::Target target() const override { return name_ == "gfx942" ? gpu::Target::cdna3 : gpu::Target::rdna4; }
  void* allocate(std::size_t bytes) override {
    char* const p = new char[bytes];
    device_.register_buffer(static_cast<void*>(p), bytes);
    return p;
  }
  void release(void* p) override {
    device_.unregister_buffer(p);
    delete[] static_cast<char*>(p);
  }
  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }

  float launch(const gpu::KernelRow& row, unsigned blocks, const void* args, std::size_t args_bytes, int) override {
    gfxsim::LaunchOptions options;
    options.threads = 2;
    options.schedule = gfxsim::Schedule::random;
    options.seed = ++launches_;
    options.statistics = true;
    const gfxsim::LaunchResult result =
        device_.launch(module_of(row), row.name, {blocks}, {std::uint32_t(row.threads())}, 0,
                       {static_cast<const std::byte*>(args), args_bytes}, options);
    if (!result.ok()) throw std::runtime_error(result.reports.front().to_string());
    gfxsim::Statistics& s = statistics_[row.name];
    s.instructions += result.statistics.instructions;
    s.lds_clocks += result.statistics.lds_clocks;
    s.lds_conflict_clocks += result.statistics.lds_conflict_clocks;
    return 0;
  }

 private:
  const gfxsim::Module& module_of(const gpu::KernelRow& row) {
    auto& module = modules_[gpu::object_name(row.family)];
    if (module) return *module;
    std::ifstream file(directory_ / (std::string(gpu::object_name(row.family)) + ".co"), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    module = device_.load(std::as_bytes(std::span(bytes)));
    return *module;
  }

  std::filesystem::path directory_;
  std::string name_;
  gfxsim::Device device_;
  std::map<std::string, std::shared_ptr<const gfxsim::Module>> modules_;
  std::map<std::string, gfxsim::Statistics> statistics_;
  std::uint64_t launches_ = 0;
};

}  // namespace

std::unique_ptr<KernelDevice> open_device(const std::string& directory) {
  return std::make_unique<SimulatedDevice>(std::filesystem::path(directory).lexically_normal());
}

}  // namespace flash_attn::testing
