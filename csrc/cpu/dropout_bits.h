// Which elements dropout keeps (core/dropout.h), a bit each, for many elements at a time, in the two orders that strips
// need.
#pragma once

#include "core/dropout.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

// philox4x32 of one counter per lane. A Wide has 64-bit lanes of which the low 32 bits count: that is what vector units
// multiply, and nothing then has to be moved between lanes.
template <class Wide>
FA_INLINE void philox_lanes(Wide w[4], PhiloxKey key) {
  const Wide m0(0xD2511F53u), m1(0xCD9E8D57u);
  for (int round = 0; round < 10; ++round) {
    const Wide a = multiply_low(m0, w[0]), b = multiply_low(m1, w[2]);
    w[0] = exclusive_or(high_half(b), w[1], Wide(key.lo));
    w[1] = b;
    w[2] = exclusive_or(high_half(a), w[3], Wide(key.hi));
    w[3] = a;
    key.lo += 0x9E3779B9u;
    key.hi += 0xBB67AE85u;
  }
}

// Bit j - j0 of `bits` for j in [j0, j0 + n) of query i; j0 is a multiple of 64, and whole groups of 256 are written.
// `Target` keeps the copies of kernels apart that share a vector type but not an instruction set.
template <class Simd, class Target = Simd>
void dropout_row(const DropoutRule& rule, index_t b, index_t h, index_t i, index_t j0, index_t n, std::uint8_t* bits) {
  using Wide = typename Simd::Wide;
  constexpr index_t kLanes = 2 * Wide::kLanes;
  for (index_t j = 0; j < n; j += 16 * kLanes) {
    const auto counter = std::uint32_t((j0 + j) / 16);
    const Wide row(static_cast<std::uint32_t>(i)), batch(static_cast<std::uint32_t>(b)),
        head(static_cast<std::uint32_t>(h));
    Wide even[4] = {Wide::every_second(counter), row, batch, head};
    Wide odd[4] = {Wide::every_second(counter + 1), row, batch, head};
    philox_lanes(even, rule.subkey);
    philox_lanes(odd, rule.subkey);
    // Lane = 4 * (64-key block) + group; word = 16-key run inside the block, whose keys 4 * group .. + 3 are its bytes.
    for (int word = 0; word < 4; ++word) {
      const std::uint64_t kept = Simd::bytes_at_most(even[word], odd[word], rule.keep_threshold);
      for (index_t block = 0; block < kLanes / 4; ++block) {
        std::uint8_t* const run = bits + (j + block * 64 + word * 16) / 8;
        run[0] = std::uint8_t(kept >> (16 * block));
        run[1] = std::uint8_t(kept >> (16 * block + 8));
      }
    }
  }
}

// Rows of different queries and heads: each twice, as lanes want it.
struct DropoutRows {
  static constexpr index_t kLanesOfRow = 2;
  const std::uint64_t *queries, *heads;
};

// Bit j - j0 of bits[8 * t] for the 64 keys from j0 on, a multiple of 64, and rows t of [begin, end), as many at a time
// as there are lanes for.
template <class Simd, class Target = Simd>
void dropout_rows(const DropoutRule& rule, index_t b, const DropoutRows& rows, Range range, index_t j0,
                  std::uint8_t* bits) {
  using Wide = typename Simd::Wide;
  constexpr index_t kOfRow = DropoutRows::kLanesOfRow, kRows = Wide::kLanes / kOfRow, kBytes = kKeyAlign / 8;
  // Lane = 4 * row + group, of which every second one is in `even`.
  std::uint64_t counters[2][Wide::kLanes];
  for (index_t lane = 0; lane < Wide::kLanes; ++lane)
    for (index_t n = 0; n < 2; ++n) counters[n][lane] = std::uint64_t(j0 / 16 + lane % kOfRow * 2 + n);
  const Wide first = Wide::load(counters[0]), second = Wide::load(counters[1]), batch(static_cast<std::uint32_t>(b));
  for (index_t t = range.begin; t < range.end; t += kRows) {
    const Wide query = Wide::load(rows.queries + t * kOfRow), head = Wide::load(rows.heads + t * kOfRow);
    Wide even[4] = {first, query, batch, head}, odd[4] = {second, query, batch, head};
    philox_lanes(even, rule.subkey);
    philox_lanes(odd, rule.subkey);
    for (int word = 0; word < 4; ++word) {
      const std::uint64_t kept = Simd::bytes_at_most(even[word], odd[word], rule.keep_threshold);
      for (index_t row = 0; row < kRows; ++row) {
        std::uint8_t* const run = bits + (t + row) * kBytes + word * 2;
        run[0] = std::uint8_t(kept >> (16 * row));
        run[1] = std::uint8_t(kept >> (16 * row + 8));
      }
    }
  }
}

// Bit i - i0 of bits[(j - j0) * stride ...] for the 64 keys from j0 (a multiple of 64) and queries i0 .. i0 + n - 1;
// queries are written in whole groups of 16. stride: bytes.
template <class Simd, class Target = Simd>
void dropout_columns(const DropoutRule& rule, index_t b, index_t h, index_t i0, index_t n, index_t j0,
                     std::uint8_t* bits, index_t stride) {
  using Wide = typename Simd::Wide;
  constexpr index_t kLanes = 2 * Wide::kLanes;
  for (index_t i = 0; i < round_up(n, 16); i += kLanes)
    for (int group = 0; group < 4; ++group) {
      const auto first = static_cast<std::uint32_t>(i0 + i);
      const Wide counter(static_cast<std::uint32_t>(j0 / 16 + group)), batch(static_cast<std::uint32_t>(b)),
          head(static_cast<std::uint32_t>(h));
      Wide even[4] = {counter, Wide::every_second(first), batch, head};
      Wide odd[4] = {counter, Wide::every_second(first + 1), batch, head};
      philox_lanes(even, rule.subkey);
      philox_lanes(odd, rule.subkey);
      for (int word = 0; word < 4; ++word) {
        const std::uint64_t kept = Simd::bytes_at_most_by_byte(even[word], odd[word], rule.keep_threshold);
        for (int byte = 0; byte < 4; ++byte)
          for (index_t k = 0; k < kLanes; k += 8)
            bits[(word * 16 + group * 4 + byte) * stride + (i + k) / 8] = std::uint8_t(kept >> (byte * kLanes + k));
      }
    }
}

}  // namespace flash_attn::cpu
