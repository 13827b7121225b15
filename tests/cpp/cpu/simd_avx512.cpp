#include "cpu/simd/avx512.h"
#include "cpu/simd_functions.h"

namespace flash_attn::testing {

const SimdFunctions& avx512_functions() {
  static constexpr SimdFunctions functions =
      SimdFunctionsOf<cpu::Avx512Simd>::table<cpu::ByEstimate, cpu::FlushSubnormals>("avx512");
  return functions;
}

}  // namespace flash_attn::testing
