#include "cpu/rotary_rows.h"
#include "cpu/simd/avx512.h"

namespace flash_attn::cpu {

const Rotations& avx512_rotations() {
  static const Rotations rotations = rotations_of<Avx512Simd>(portable_rotations().f64);
  return rotations;
}

}  // namespace flash_attn::cpu
