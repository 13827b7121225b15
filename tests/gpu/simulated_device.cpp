#include "simulated_device.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

namespace flash_attn::testing {
namespace {

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read '" + path + "'; the CMake target flash_attn_kernels makes it");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string last_component(const std::string& directory) {
  return std::filesystem::weakly_canonical(directory).filename().string();
}

}  // namespace

SimulatedDevice::SimulatedDevice(const std::string& directory)
    : directory_(directory), target_name_(last_component(directory)), device_(target_name_) {}

gpu::Target SimulatedDevice::target() const { return gpu::amd_target(target_name_).value(); }

void* SimulatedDevice::allocate(std::size_t bytes) {
  char* const p = new char[bytes];
  if (bytes > 2 * kGuardBytes) {
    device_.register_buffer(p + kGuardBytes, bytes - 2 * kGuardBytes);
    registered_.insert(p);
  }
  return p;
}
void SimulatedDevice::release(void* p) {
  char* const begin = static_cast<char*>(p);
  if (registered_.erase(begin)) device_.unregister_buffer(begin + kGuardBytes);
  delete[] begin;
}
void SimulatedDevice::upload(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
void SimulatedDevice::download(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

gfxsim::LaunchOptions SimulatedDevice::options(std::uint64_t seed) const {
  gfxsim::LaunchOptions out;
  out.schedule = gfxsim::Schedule::random;
  out.seed = seed;
  out.threads = 0;
  return out;
}

gfxsim::LaunchResult SimulatedDevice::run(const SimulatedLaunch& launch, const gfxsim::LaunchOptions& options) const {
  return device_.launch(launch.module, launch.kernel, launch.grid, launch.block, 0, launch.arguments, options);
}

float SimulatedDevice::launch(const gpu::KernelRow& row, unsigned blocks, const void* args, std::size_t args_bytes,
                              int repeats) {
  auto& module = modules_[gpu::object_name(row.family)];
  if (!module) {
    const std::vector<char> bytes = read_file(directory_ + "/" + gpu::object_name(row.family) + ".co");
    module = device_.load(std::as_bytes(std::span(bytes)));
  }
  const SimulatedLaunch launch{
      *module, row.name, {blocks}, {unsigned(row.threads())}, {static_cast<const std::byte*>(args), args_bytes}};
  before(launch);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    gfxsim::LaunchOptions chosen = options(++launches_);
    chosen.statistics = true;
    const gfxsim::LaunchResult result = run(launch, chosen);
    after(launch, result);
    if (!result.ok()) throw std::runtime_error(result.reports.front().to_string());
  }
  const std::chrono::duration<float, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / float(repeats);
}

}  // namespace flash_attn::testing
