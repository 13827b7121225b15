// Kernels on the simulator of AMD GPUs, from the code objects that ship.
#pragma once

#include <map>
#include <set>

#include "device.h"
#include "gfxsim/gfxsim.h"

namespace flash_attn::testing {

// A launch that is about to run.
struct SimulatedLaunch {
  const gfxsim::Module& module;
  std::string kernel;
  gfxsim::Dim3 grid, block;
  std::span<const std::byte> arguments;
};

// Every launch has all checks on and another random wave order. Findings are errors.
class SimulatedDevice : public KernelDevice {
 public:
  // The directory's name is the target.
  explicit SimulatedDevice(const std::string& directory);

  gpu::Target target() const override;
  const std::string& target_name() const { return target_name_; }
  void* allocate(std::size_t bytes) override;
  void release(void* p) override;
  void upload(void* to, const void* from, std::size_t bytes) override;
  void download(void* to, const void* from, std::size_t bytes) override;
  float launch(const gpu::KernelRow& row, unsigned blocks, const void* args, std::size_t args_bytes,
               int repeats) override;

 protected:
  virtual void before(const SimulatedLaunch&) {}
  virtual void after(const SimulatedLaunch&, const gfxsim::LaunchResult&) {}
  gfxsim::LaunchResult run(const SimulatedLaunch& launch, const gfxsim::LaunchOptions& options) const;
  gfxsim::LaunchOptions options(std::uint64_t seed) const;

 private:
  std::string directory_, target_name_;
  gfxsim::Device device_;
  std::set<void*> registered_;  // allocations that hold more than guards
  std::uint64_t launches_ = 0;
  std::map<std::string, std::shared_ptr<const gfxsim::Module>> modules_;
};

}  // namespace flash_attn::testing
