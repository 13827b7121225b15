// What this machine's processor and operating system can execute.
#pragma once

#include <cstdint>

namespace flash_attn::cpu {

struct Features {
  bool avx2 = false;         // AVX2, FMA and F16C
  bool avx512 = false;       // AVX-512 F, BW, DQ, VL
  bool avx512_bf16 = false;  // the above and AVX512-BF16
  bool amx_bf16 = false;     // the above, AMX-TILE and AMX-BF16, and the tile registers were granted to this process
  bool bf16_dot_is_fast = false;  // AVX512-BF16 does more than fp32 multiply-adds do
  bool neon_bf16 = false;         // FEAT_BF16 of AArch64, whose Advanced SIMD is always there
};

/// Asks the operating system for the tile registers.
Features detect_features();

/// Whether products can hide asking for what the next task loads (forward_ahead.h): a few of AMD's cycles for each
/// line, which is less than to wait for it later, unless it is in the caches already. A Xeon gained nothing but in
/// tiles (asks_ahead).
bool asks_between_products();

/// Cores on which other kernels of an instruction set are the faster ones: where queries go into the lanes (lanes.h),
/// and where backward takes tall strips (backend.cpp). A Zen 5 begins two products of 512 bits in a cycle, a Zen 4 one;
/// later cores of AMD's count as Zen 5. A Xeon is up to 8 % faster and up to 7 % slower with queries in the lanes
/// (fp32), and as fast by tall strips (docs/cpu-windows.md). Golden Cove, of Sapphire and Emerald Rapids, multiplies
/// fp32 by vectors faster than in tiles when all of its threads are busy, by up to a third (docs/cpu-amx.md).
enum class Core { other, golden_cove, zen4, zen5 };
Core core();
/// For tests, which run the kernels of all of them on any processor.
void suppose_core(Core core);

/// Whether what is read a while later is better asked for into L2 than into L1. A prefetch into L1 holds one of its few
/// miss buffers (24 in Zen 4) for as long as memory takes, and so do the loads beside it: decoding read 8.8 GB/s on a
/// core of a Zen 4 by such prefetches and 17 by those into L2, and a Xeon with 2 MB of L2 is 8 to 17 % faster by the
/// latter. A Zen 5 loses by those, in decoding, in windows and for rows of a bias (docs/cpu-decoding.md).
bool prefetches_into_l2();

/// Whether decoding that asks into L2 is to idle between the lines that it asks memory for, where four rows meet them.
/// A Zen 4 is 3 to 10 % faster by it, a Xeon 2 to 5 % slower (docs/cpu-decoding.md).
bool idles_at_memory();

/// Whether additions begin beside multiply-adds of 512 bits, one to two of these, so that scores gain by pairs of
/// features (paired_products.h). Intel's take the same pipelines, and a Zen 5 has not been measured.
bool multiplies_by_adders();

/// Whether results of so many bytes, which so many threads write, are stored past the caches: on a Zen 4 those that are
/// more than twice the L2 of these threads. Whoever reads them next finds them in memory instead of L3, which costs
/// less than what the call saves, as no line is fetched to be overwritten. A Xeon with few threads gained nothing, and
/// a Zen 5 has not been measured (docs/cpu-zen4.md).
bool stores_past_caches(std::int64_t bytes, int threads);

}  // namespace flash_attn::cpu
