// What this machine's processor and operating system can execute.
#pragma once

namespace flash_attn::cpu {

struct Features {
  bool avx2 = false;         // AVX2, FMA and F16C
  bool avx512 = false;       // AVX-512 F, BW, DQ, VL
  bool avx512_bf16 = false;  // the above and AVX512-BF16
  bool amx_bf16 = false;     // the above, AMX-TILE and AMX-BF16, and the tile registers were granted to this process
  bool bf16_dot_is_fast = false;  // AVX512-BF16 does more than fp32 multiply-adds do
};

/// Asks the operating system for the tile registers.
Features detect_features();

/// Whether products can hide asking for what the next task loads (forward_ahead.h): a few of AMD's cycles for each
/// line, which is less than to wait for it later, unless it is in the caches already. A Xeon gained nothing.
bool asks_between_products();

/// Whether two products of 512 bits begin in each cycle, as on a Zen 5. Then attention to few keys is computed with the
/// queries in the lanes (forward_lanes.h), since what strips of rows do once a row takes up to a quarter of such calls,
/// and backward by tall strips (target.h), which ask for rows ahead of their turn (backward_ahead.h). On a Zen 4, whose
/// products take twice as long, the former was no faster in a trial, and the latter has not been measured; a Xeon is up
/// to 8 % faster and up to 7 % slower with the former (fp32), and as fast with the latter (docs/cpu-kernels.md).
bool has_quick_products();
/// For tests, which run both on any processor: from now on as if it had, or had not.
void suppose_quick_products(bool quick);

/// Whether what is read a while later is better asked for into L2 than into L1. A prefetch into L1 holds one of its few
/// miss buffers (24 in Zen 4) for as long as memory takes, and so do the loads beside it: decoding read 8.8 GB/s on a
/// core of a Zen 4 by such prefetches and 17 by those into L2, and a Xeon with 2 MB of L2 is 8 to 17 % faster by the
/// latter. A Zen 5 loses by those, in decoding, in windows and for rows of a bias (docs/cpu-kernels.md).
bool prefetches_into_l2();

/// Whether decoding that asks into L2 and converts what it reads is to idle between the lines that it asks for, as it
/// does where nothing is converted. fp16 of 537 MB is up to 7 % faster by it on a Zen 4 (in one of two comparisons no
/// faster), and 3 to 15 % slower on a Xeon, which decodes bf16 a tenth faster (docs/cpu-kernels.md).
bool idles_while_converting();

}  // namespace flash_attn::cpu
