// What global, flat, scratch and buffer instructions share: one access per lane, and moving its bytes to and from
// registers.
#pragma once

#include "wave.h"

namespace gfxsim {

// How a small value fills a 32-bit register.
enum class Into : std::uint8_t { whole, low_keep, high_keep };

struct AccessShape {
  std::uint32_t bytes = 4;
  bool is_signed = false;
  Into into = Into::whole;  // of a store: high_keep stores the high half
};

// Where the bytes of one lane are; null: reported, or left out.
struct Location {
  std::uint8_t* data = nullptr;
  std::uint8_t* defined = nullptr;  // one flag per byte, for scratch; null: everything there is defined
};

/// Registered memory at `address`, or a null location after a report. Accesses of more bytes than `alignment` need no
/// more than that; only atomics do.
Location locate_global(Wave& wave, const Op& op, int lane, std::uint64_t address, std::uint32_t bytes, bool is_write,
                       std::uint32_t alignment = 4);
Location locate_scratch(Wave& wave, const Op& op, int lane, std::uint32_t offset, std::uint32_t bytes);

void read_lane(Wave& wave, int reg, int lane, Location from, AccessShape shape);
/// Reports undefined data, then stores.
void write_lane(Wave& wave, const Op& op, int reg, int lane, Location to, AccessShape shape);

/// Statistics of one instruction: bytes and 128-byte lines of all its lanes.
void count_lines(Wave& wave, const Op& op, const std::uint64_t* address, std::uint64_t lanes, std::uint32_t bytes);

/// Reports lanes of `lanes` whose address is not defined.
void require_defined_address(Wave& wave, const Op& op, std::uint64_t lanes, std::uint64_t defined);

/// A word arriving in LDS from global memory.
void note_lds_write(Wave& wave, const Op& op, int lane, std::uint32_t address, std::uint32_t value, bool defined,
                    std::uint32_t number);

}  // namespace gfxsim
