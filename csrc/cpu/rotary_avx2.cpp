#include "cpu/rotary_rows.h"
#include "cpu/simd/avx2.h"

namespace flash_attn::cpu {

const Rotations& avx2_rotations() {
  static const Rotations rotations = rotations_of<Avx2Simd>(portable_rotations().f64);
  return rotations;
}

}  // namespace flash_attn::cpu
