#include "cpu/rotary_rows.h"

namespace flash_attn::cpu {

const Rotations& portable_rotations() {
  static constexpr Rotations rotations =
      rotations_of<PortableSimd<float, 8>>(rotate_row<PortableSimd<double, 4>, double>);
  return rotations;
}

}  // namespace flash_attn::cpu
