#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& amx_bf16_emulated_fp32_kernels() {
  static constexpr Kernels kernels = kernels_of<EmulatedAmxBf16<3>>(
      "amx_bf16_emulated", "products of fp32 as 3 bf16, fp32 sums, tile instructions emulated");
  return kernels;
}

}  // namespace flash_attn::cpu
