// LDS clocks of one instruction by the phase rules of the target: lanes are served in groups; within a group, lanes
// that need different words of one bank wait for each other.
#pragma once

#include <cstdint>

#include "target.h"

namespace gfxsim {

struct LdsClocks {
  std::uint32_t total = 0;      // clocks the access takes
  std::uint32_t conflicts = 0;  // of these, clocks that a conflict-free access would not take
};

/// `address`: byte address of each lane's access of `bytes` bytes (1 to 16). `lanes`: which are active, of a wave of
/// `wave_lanes`.
LdsClocks lds_clocks(const Target& target, const std::uint32_t* address, std::uint64_t lanes, int wave_lanes,
                     std::uint32_t bytes, bool is_read);

}  // namespace gfxsim
