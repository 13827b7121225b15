// The instruction sets that the CPU backend has kernels for, and which of them is in use.
#pragma once

#include "cpu/cpuid.h"

namespace flash_attn::cpu {

// Best first. The first entry that the machine executes well is used unless another is forced. The emulation exists to
// test the tiles' kernels, and comes after sets that every machine has which executes it.
enum Isa { kAmxBf16, kAvx512Bf16, kAvx512, kAvx2, kAmxBf16Emulated, kNeonBf16, kNeon, kPortable, kIsaCount };
inline constexpr const char* kIsaNames[kIsaCount] = {"amx_bf16",          "avx512_bf16", "avx512", "avx2",
                                                     "amx_bf16_emulated", "neon_bf16",   "neon",   "portable"};

#if defined(FLASH_ATTN_EMULATED_TILES)
inline constexpr bool kEmulatesTiles = true;
#else
inline constexpr bool kEmulatesTiles = false;
#endif

const Features& features();
bool executable(Isa isa);
Isa best_isa();
// Throws Error where the environment names none that this machine executes: at the first use, so that a wrong value is
// an exception of the call and not of loading.
Isa current_isa();

}  // namespace flash_attn::cpu
