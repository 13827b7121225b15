#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& avx512_kernels() {
  static constexpr Kernels kernels = kernels_of<Avx512>("avx512", "fp32");
  return kernels;
}

}  // namespace flash_attn::cpu
