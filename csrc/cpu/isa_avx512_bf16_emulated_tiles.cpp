#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& amx_bf16_emulated_kernels() {
  static constexpr Kernels kernels =
      kernels_of<EmulatedAmxBf16<1>>("amx_bf16_emulated", "bf16 products, fp32 sums, tile instructions emulated");
  return kernels;
}

const Kernels& amx_bf16_emulated_few_kernels() {
  static constexpr Kernels kernels = direct_tile_kernels_of<EmulatedDirectTiles>(
      "amx_bf16_emulated", "bf16 products, fp32 sums, tile instructions emulated");
  return kernels;
}

}  // namespace flash_attn::cpu
