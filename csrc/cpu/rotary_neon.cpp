#include "cpu/rotary_rows.h"
#include "cpu/simd/neon.h"

namespace flash_attn::cpu {

const Rotations& neon_rotations() {
  static const Rotations rotations = rotations_of<NeonSimd>(portable_rotations().f64);
  return rotations;
}

}  // namespace flash_attn::cpu
