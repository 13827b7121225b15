#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& amx_bf16_fp16_kernels() {
  static constexpr Kernels kernels = kernels_of<AmxBf16<2>>("amx_bf16", "products of fp16 as 2 bf16, fp32 sums");
  return kernels;
}

}  // namespace flash_attn::cpu
