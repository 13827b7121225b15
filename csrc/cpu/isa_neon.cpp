#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& neon_kernels() {
  static constexpr Kernels kernels = kernels_of<Neon>("neon", "fp32");
  return kernels;
}

}  // namespace flash_attn::cpu
