#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& avx512_bf16_kernels() {
  static constexpr Kernels kernels = kernels_of<Avx512Bf16>("avx512_bf16", "bf16 products, fp32 sums");
  return kernels;
}

}  // namespace flash_attn::cpu
