#include "cpu/kernels.h"

namespace flash_attn::cpu {

const Kernels& portable_kernels() {
  static constexpr Kernels kernels = kernels_of<Portable32>("portable", "fp32");
  return kernels;
}

const Kernels& portable_f64_kernels() {
  static constexpr Kernels kernels = kernels_of<Portable64>("portable", "fp64");
  return kernels;
}

}  // namespace flash_attn::cpu
