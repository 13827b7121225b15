#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& avx2_kernels() {
  static constexpr Kernels kernels = kernels_of<Avx2>("avx2", "fp32");
  return kernels;
}

}  // namespace flash_attn::cpu
