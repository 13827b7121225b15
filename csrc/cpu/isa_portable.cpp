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

// Of a plan, with which rows_ahead_test.cpp would compile all of these again.
template DirectProducts<Portable32> direct_products<Portable32>(DType, Asking);

}  // namespace flash_attn::cpu
