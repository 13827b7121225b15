// The dropout bytes of core/dropout.h for many elements at a time, in the two orders that strips need.
#pragma once

#include "core/dropout.h"

namespace flash_attn::cpu {

inline constexpr int kPhiloxLanes = 16;

// philox4x32 of kPhiloxLanes counters at once; written as lane loops so that compilers use the target's vectors.
// `Tag` keeps one copy per instruction set apart.
template <class Tag>
void philox_lanes(std::uint32_t w[4][kPhiloxLanes], PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    for (int n = 0; n < kPhiloxLanes; ++n) {
      const std::uint64_t a = std::uint64_t(0xD2511F53u) * w[0][n];
      const std::uint64_t b = std::uint64_t(0xCD9E8D57u) * w[2][n];
      const std::uint32_t old1 = w[1][n], old3 = w[3][n];
      w[0][n] = std::uint32_t(b >> 32) ^ old1 ^ key.lo;
      w[1][n] = std::uint32_t(b);
      w[2][n] = std::uint32_t(a >> 32) ^ old3 ^ key.hi;
      w[3][n] = std::uint32_t(a);
    }
    key.lo += 0x9E3779B9u;
    key.hi += 0xBB67AE85u;
  }
}

// bytes[j - j0] for j in [j0, j0 + n) of query i; j0 is a multiple of 64, and whole groups of 256 are written.
template <class Tag>
void dropout_row(const DropoutRule& rule, index_t b, index_t h, index_t i, index_t j0, index_t n, std::uint8_t* bytes) {
  for (index_t j = 0; j < n; j += 4 * kPhiloxLanes * 4) {
    std::uint32_t w[4][kPhiloxLanes];
    for (int lane = 0; lane < kPhiloxLanes; ++lane) {
      w[0][lane] = std::uint32_t((j0 + j) / 16 + lane);
      w[1][lane] = std::uint32_t(i);
      w[2][lane] = std::uint32_t(b);
      w[3][lane] = std::uint32_t(h);
    }
    philox_lanes<Tag>(w, rule.subkey);
    // Lane = 4 * (64-key block) + group; word = 16-key run inside the block, whose keys 4 * group .. + 3 are its bytes.
    for (int lane = 0; lane < kPhiloxLanes; ++lane)
      for (int word = 0; word < 4; ++word)
        for (int byte = 0; byte < 4; ++byte)
          bytes[j + (lane / 4) * 64 + word * 16 + (lane % 4) * 4 + byte] = std::uint8_t(w[word][lane] >> (8 * byte));
  }
}

// bytes[(j - j0) * stride + i - i0] for the 64 keys from j0 (a multiple of 64) and queries i0 .. i0 + n - 1; queries
// are written in whole groups of kPhiloxLanes.
template <class Tag>
void dropout_columns(const DropoutRule& rule, index_t b, index_t h, index_t i0, index_t n, index_t j0,
                     std::uint8_t* bytes, index_t stride) {
  for (index_t i = 0; i < n; i += kPhiloxLanes)
    for (int group = 0; group < 4; ++group) {
      std::uint32_t w[4][kPhiloxLanes];
      for (int lane = 0; lane < kPhiloxLanes; ++lane) {
        w[0][lane] = std::uint32_t(j0 / 16 + group);
        w[1][lane] = std::uint32_t(i0 + i + lane);
        w[2][lane] = std::uint32_t(b);
        w[3][lane] = std::uint32_t(h);
      }
      philox_lanes<Tag>(w, rule.subkey);
      for (int word = 0; word < 4; ++word)
        for (int byte = 0; byte < 4; ++byte) {
          std::uint8_t* out = bytes + (word * 16 + group * 4 + byte) * stride + i;
          for (int lane = 0; lane < kPhiloxLanes; ++lane) out[lane] = std::uint8_t(w[word][lane] >> (8 * byte));
        }
    }
}

}  // namespace flash_attn::cpu
