#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& amx_bf16_emulated_fp16_kernels() {
  static constexpr Kernels kernels = kernels_of<EmulatedAmxBf16<2>>(
      "amx_bf16_emulated", "products of fp16 as 2 bf16, fp32 sums, tile instructions emulated");
  return kernels;
}

}  // namespace flash_attn::cpu
