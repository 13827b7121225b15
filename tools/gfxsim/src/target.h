// What differs between targets, beyond the opcodes themselves.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gfxsim {

struct Target {
  std::string name;
  int generation = 9;            // 9: GCN and CDNA, 10: RDNA1 and 2, 11: RDNA3, 12: RDNA4
  bool counts_stores = false;    // in a counter of their own, not in that of loads
  bool keeps_high_half = false;  // 16-bit results leave the other half of their register alone
  bool groups_in_ttmp = false;   // workgroup ids in ttmp9 and ttmp7
  bool packs_items = true;       // work-item ids in one register, not in three
  int lds_banks = 32;
  std::uint32_t lds_bytes = 64 * 1024;  // of a workgroup
};

/// Throws Error naming the targets there are.
const Target& find_target(std::string_view name);

constexpr std::uint64_t kSharedAperture = std::uint64_t(0x10000) << 32;
constexpr std::uint64_t kPrivateAperture = std::uint64_t(0x20000) << 32;

}  // namespace gfxsim
