#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& neon_bf16_kernels() {
  static constexpr Kernels kernels = kernels_of<NeonBf16>("neon_bf16", "bf16 products, fp32 sums");
  return kernels;
}

}  // namespace flash_attn::cpu
