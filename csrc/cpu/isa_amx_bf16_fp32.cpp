#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& amx_bf16_fp32_kernels() {
  static constexpr Kernels kernels = kernels_of<AmxBf16<3>>("amx_bf16", "products of fp32 as 3 bf16, fp32 sums");
  return kernels;
}

}  // namespace flash_attn::cpu
