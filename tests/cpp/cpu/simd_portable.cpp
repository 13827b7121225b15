#include "cpu/simd/portable.h"
#include "cpu/simd_functions.h"

namespace flash_attn::testing {

const SimdFunctions& portable_functions() {
  static constexpr SimdFunctions functions = SimdFunctionsOf<cpu::PortableSimd<float, 8>>::table("portable");
  return functions;
}

}  // namespace flash_attn::testing
