#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& amx_bf16_kernels() {
  static constexpr Kernels kernels = kernels_of<AmxBf16<1>>("amx_bf16", "bf16 products, fp32 sums");
  return kernels;
}

const Kernels& amx_bf16_few_kernels() {
  static constexpr Kernels kernels = direct_tile_kernels_of<AmxDirectTiles>("amx_bf16", "bf16 products, fp32 sums");
  return kernels;
}

}  // namespace flash_attn::cpu
