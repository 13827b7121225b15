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
  bool unified_registers = false;       // AGPRs are the upper part of a wave's vector registers

  // Flat accesses return in the order of other loads, and of LDS operations: LLVM's hasFlatLgkmVMemCountInOrder.
  bool flat_in_order() const { return generation > 9; }
  // 16-bit loads into one half of a register leave the other half alone: LLVM's d16PreservesUnusedBits. Memory with
  // error correction (SRAM-ECC) writes whole registers. All targets of generation 9 have it or, gfx906, may have it.
  bool d16_keeps_half() const { return generation > 9; }
};

/// Throws Error naming the targets there are.
const Target& find_target(std::string_view name);

constexpr std::uint64_t kSharedAperture = std::uint64_t(0x10000) << 32;
constexpr std::uint64_t kPrivateAperture = std::uint64_t(0x20000) << 32;

}  // namespace gfxsim
