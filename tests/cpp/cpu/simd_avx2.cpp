#include "cpu/simd/avx2.h"
#include "cpu/simd_functions.h"

namespace flash_attn::testing {

const SimdFunctions& avx2_functions() {
  static constexpr SimdFunctions functions = SimdFunctionsOf<cpu::Avx2Simd>::table("avx2");
  return functions;
}

}  // namespace flash_attn::testing
