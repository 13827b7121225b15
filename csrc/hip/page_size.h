// Slots of a page of a cache, and how a kernel divides by them. Shared by host and device.
#pragma once

#include "core/platform.h"

namespace flash_attn::gpu {

// n / size is the high word of 2 n * factor, shifted, for n < 2^31: Granlund and Montgomery, "Division by invariant
// integers using multiplication", PLDI 1994, theorem 4.2. A division by itself costs a row's address twenty
// instructions.
struct PageSize {
  std::int32_t size;
  std::uint32_t factor, shift;

  FA_INLINE std::uint32_t page_of(std::uint32_t slot) const {
    return static_cast<std::uint32_t>(std::uint64_t(2 * slot) * factor >> 32) >> shift;
  }
};

// Of at least 1 slot.
constexpr PageSize page_size(std::int32_t slots) {
  std::uint32_t shift = 0;
  while (std::int64_t(1) << shift < slots) ++shift;
  return {slots, static_cast<std::uint32_t>(((std::uint64_t(1) << (31 + shift)) + slots - 1) / slots), shift};
}

}  // namespace flash_attn::gpu
