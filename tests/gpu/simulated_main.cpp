// kernel_check on the simulator.
#include "simulated_device.h"

namespace flash_attn::testing {

std::unique_ptr<KernelDevice> open_device(const std::string& directory) {
  return std::make_unique<SimulatedDevice>(directory);
}

}  // namespace flash_attn::testing
