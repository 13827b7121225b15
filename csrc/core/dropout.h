// Dropout: which elements of P are kept. The mask depends on (seed, offset, b, h, i, j) alone, so it is the same
// forward and backward, for every tile size, thread count, backend and architecture, and a test can rebuild it.
//
// Random words come from Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011).
//   subkey = philox(counter = (offset_lo, offset_hi, 0, 0), key = seed), its first two words
//   word   = philox(counter = ((j / 64) * 4 + (j / 4) % 4, i, b, h), key = subkey)[(j / 16) % 4]
//   byte   = byte j % 4 of word;  kept iff byte <= floor(255 * (1 - p))
// One call gives the 16 bytes of keys that share j/64 and (j/4)%4: that is what one lane owns of 64 keys in the 16x16
// matrix layouts of CDNA, half of what it owns in the 32x32 and gfx12 layouts, where lanes hold runs of 4 keys 8 or 16
// apart.
#pragma once

#include <cmath>

#include "core/platform.h"

namespace flash_attn {

struct PhiloxKey {
  std::uint32_t lo, hi;
};
struct PhiloxWords {
  std::uint32_t w[4];
};

FA_INLINE PhiloxWords philox4x32(PhiloxWords counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t(0xD2511F53u) * counter.w[0];
    const std::uint64_t b = std::uint64_t(0xCD9E8D57u) * counter.w[2];
    counter = {{std::uint32_t(b >> 32) ^ counter.w[1] ^ key.lo, std::uint32_t(b),
                std::uint32_t(a >> 32) ^ counter.w[3] ^ key.hi, std::uint32_t(a)}};
    key.lo += 0x9E3779B9u;
    key.hi += 0xBB67AE85u;
  }
  return counter;
}

// Everything a kernel needs to know of dropout. Inactive: p = 0.
struct DropoutRule {
  PhiloxKey subkey{0, 0};
  std::uint32_t keep_threshold = 255;  // Kept iff byte <= threshold.
  bool active = false;
  double keep_scale = 1.0;  // 1 / (1 - p)

  FA_INLINE bool keep(std::uint32_t byte) const { return byte <= keep_threshold; }

  // The 16 bytes of group `sub` (0..3) of the 64 keys from 64 * key_block on, query i.
  FA_INLINE PhiloxWords bytes(index_t b, index_t h, index_t i, index_t key_block, int sub) const {
    return philox4x32({{std::uint32_t(key_block * 4 + sub), std::uint32_t(i), std::uint32_t(b), std::uint32_t(h)}},
                      subkey);
  }
};

// seed and offset: the raw bits of rng_state[0] and rng_state[1].
inline DropoutRule make_dropout(double p, std::int64_t seed, std::int64_t offset) {
  DropoutRule rule;
  if (p <= 0.0) return rule;
  const auto s = static_cast<std::uint64_t>(seed);
  const auto o = static_cast<std::uint64_t>(offset);
  const PhiloxWords words =
      philox4x32({{std::uint32_t(o), std::uint32_t(o >> 32), 0, 0}}, {std::uint32_t(s), std::uint32_t(s >> 32)});
  rule.subkey = {words.w[0], words.w[1]};
  rule.keep_threshold = static_cast<std::uint32_t>(std::floor(255.0 * (1.0 - p)));
  rule.active = true;
  rule.keep_scale = 1.0 / (1.0 - p);
  return rule;
}

}  // namespace flash_attn
