#include "cpu/simd/neon.h"
#include "cpu/simd_functions.h"

namespace flash_attn::testing {

const SimdFunctions& neon_functions() {
  static constexpr SimdFunctions functions = SimdFunctionsOf<cpu::NeonSimd>::table("neon");
  return functions;
}

}  // namespace flash_attn::testing
