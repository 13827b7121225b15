// A target for tests of plans: what is worked on, in which turn and place. It multiplies nothing.
#pragma once

#include "cpu/forward_block.h"

namespace flash_attn::cpu {

using PlannedSimd = PortableSimd<float, 16>;  // Those of 8 ask for nothing ahead of its turn.
using Planned = Target<PlannedSimd, Scalars<PlannedSimd>, 4, 4>;

// Compiling the loops of these products would take half a minute.
template <>
inline DirectProducts<Planned> direct_products<Planned>(DType, Asking) {
  return {};
}

}  // namespace flash_attn::cpu
