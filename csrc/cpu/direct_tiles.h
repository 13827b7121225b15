// Products of a few rows with rows of K and V where they are in memory, in tiles.
//
// 16 rows of memory are a tile as they are. S^T = K Q^T takes them as A; its B, Q^T, is made once for a block of rows.
// O = P V takes them as B, whose pairs in depth are then pairs of features: 16 weights, each with a zero after it, give
// the even features of O, and with the zero before it the odd ones. Half of these products are with zeros, and yet that
// is less work than to interleave rows of V (docs/cpu-amx.md).
//
// Queries are one half, as many as a tile has rows, or two. Tiles: 0 to 3 sums of O, even and odd features of two parts
// of V's rows or of two halves; 5 rows of memory; 7 scores, 3 those of the second half; others as it comes. Those
// before kShortTiles have as many rows as there are queries, if these are one half.
#pragma once

#include "cpu/direct_rows.h"
#include "cpu/few_rows.h"
#include "cpu/tiles.h"

namespace flash_attn::cpu {

template <class Target>
class DirectTiles {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using Tiles = typename Target::Tiles;
  using Ahead = LinesAhead<IntoL2>;
  static constexpr index_t kTileElems = kTileRows * kTileDepth, kHalf = kTileRows;
  static constexpr index_t kMostTiles = kDirectKeys / kTileRows, kMostHalves = Target::kRows / kHalf;

 public:
  // Queries as products take them, half by half, from rows padded with zeros.
  static void load_queries(const Elem* rows, index_t stride, index_t count, Elem* q) {
    for (index_t r = 0; r < count; r += kHalf)
      pack_transposed_panel<Target>({rows + r * stride, stride}, stride / Target::Format::kStep, kHalf, q + r * stride);
  }

  // scores[r * kDirectKeys + n] = q[r] . rows[n] for `count` queries, as loaded, and n in `keys`.
  static void multiply_keys(index_t count, const Elem* q, index_t D, const DirectRows& rows, Range keys, Real* scores) {
    count > kHalf ? multiply_keys<true>(count, q, D, rows, keys, scores)
                  : multiply_keys<false>(count, q, D, rows, keys, scores);
  }

  // sums[r] += sum of p[r * kDirectKeys + n] * rows[n] over n in `keys`, by turns of 16 even and 16 odd features.
  static void multiply_values(index_t count, const Elem* p, const DirectRows& rows, Range keys, index_t features,
                              Real* sums, bool fresh) {
    Ahead ahead(rows.ahead);
    alignas(kTileBytes) Elem weights[kMostTiles * kMostHalves * 2 * kTileElems];
    RowsAsTiles from(rows, keys);
    const index_t halves = ceil_div(count, kHalf), padded = rows_of_products<Target>(count);
    for (index_t n = 0; n < from.count(); ++n)
      for (index_t half = 0; half < halves; ++half)
        put_beside_zeros(min_of(kHalf, padded), p + half * kHalf * kDirectKeys + keys.begin + n * kTileRows,
                         weights + (n * halves + half) * 2 * kTileElems);
    fence_tiles();
    const Sums to{sums, sums_stride<Target>(features), features, fresh};
    index_t at = 0;
    if (halves > 1)
      for (; at < features; at += kTileDepth) multiply_for_halves(weights, from, at, to, ahead);
    for (; at + kTileDepth < features; at += 2 * kTileDepth) multiply_for_half<true>(weights, from, at, to, ahead);
    if (at < features) multiply_for_half<false>(weights, from, at, to, ahead);
    fence_tiles();
  }

  // o[r] += sums[r].
  static void add_sums(index_t count, const Real* sums, index_t features, Real* o, index_t o_stride) {
    add_rows_of_sums<Target, SplitPairs<Target>>(count, sums, features, o, o_stride);
  }

 private:
  struct Sums {
    Real* data;
    index_t stride, features;
    bool fresh;  // They are 0 before.
  };

  static FA_INLINE void ask_for_tile(Ahead& ahead) {
    for (index_t line = 0; line < kTileRows; ++line) ahead.ask();
  }

  // Rows of memory, 16 to a tile: where they are, if they lie at equal distances and have all features of a tile, else
  // in a copy, padded with zeros.
  class RowsAsTiles {
   public:
    FA_INLINE RowsAsTiles(const DirectRows& rows, Range keys) : rows_(rows), keys_(keys) {
      for (index_t n = 0; n < count(); ++n) bytes_[n] = distance(n);
    }
    FA_INLINE index_t count() const { return ceil_div(keys_.end - keys_.begin, kTileRows); }
    // Tile n of features from `at` on.
    template <int Tile>
    FA_INLINE void load(Tiles& tiles, index_t n, index_t at, index_t features) {
      if (bytes_[n] != 0 && at + kTileDepth <= features)
        tiles.template load<Tile>(rows_.row<Elem>(first(n)) + at, bytes_[n]);
      else
        load_copy<Tile>(tiles, n, at, features);
    }

   private:
    FA_INLINE index_t first(index_t n) const { return keys_.begin + n * kTileRows; }
    FA_INLINE const char* address(index_t row) const { return static_cast<const char*>(rows_.address[row]); }
    // Bytes from a row of tile n to the next, or 0.
    FA_INLINE index_t distance(index_t n) const {
      const index_t row = first(n);
      if (row + kTileRows > keys_.end) return 0;
      const index_t bytes = address(row + 1) - address(row);
      bool equal = true;
      for (index_t r = 2; r < kTileRows; ++r) equal = equal && address(row + r) - address(row + r - 1) == bytes;
      return equal ? bytes : 0;
    }
    template <int Tile>
    FA_NOINLINE void load_copy(Tiles& tiles, index_t n, index_t at, index_t features) {
      fence_tiles();
      for (index_t r = 0; r < kTileRows; ++r) {
        const index_t row = first(n) + r, there = row < keys_.end ? min_of(features - at, kTileDepth) : 0;
        Simd::copy_first(there > 0 ? rows_.row<Elem>(row) + at : nullptr, there, copy_ + r * kTileDepth);
      }
      fence_tiles();
      tiles.template load<Tile>(copy_, kTileBytes);
    }

    const DirectRows& rows_;
    const Range keys_;
    index_t bytes_[kMostTiles];
    alignas(kTileBytes) Elem copy_[kTileElems];
  };

  template <bool Halves>
  static void multiply_keys(index_t count, const Elem* q, index_t D, const DirectRows& rows, Range keys, Real* scores) {
    Ahead ahead(rows.ahead);
    Tiles tiles;
    constexpr index_t kQueries = (Halves ? 2 : 1) * kHalf, kBytes = kQueries * index_t(sizeof(Real));
    alignas(kTileBytes) Real products[kDirectKeys * kQueries];  // Keys x queries.
    RowsAsTiles from(rows, keys);
    fence_tiles();
    Real* to = products;
    for (index_t n = 0; n < from.count(); ++n, to += kTileRows * kQueries) {
      tiles.template zero<7>();
      if constexpr (Halves) tiles.template zero<3>();
      for (index_t d = 0; d < D; d += kTileDepth) {
        const Elem* const queries = q + d * kHalf;
        from.template load<5>(tiles, n, d, D);
        tiles.template load<6>(queries, kTileBytes);
        tiles.template multiply_add<7, 5, 6>();
        if constexpr (Halves) {
          tiles.template load<4>(queries + round_up(D, kTileDepth) * kHalf, kTileBytes);
          tiles.template multiply_add<3, 5, 4>();
        }
        ask_for_tile(ahead);
      }
      tiles.template store<7>(to, kBytes);
      if constexpr (Halves) tiles.template store<3>(to + kHalf, kBytes);
    }
    fence_tiles();
    for (index_t n = 0; n < from.count(); ++n)
      for (index_t r = 0; r < count; r += kHalf)
        Simd::transpose(products + n * kTileRows * kQueries + r, kQueries,
                        scores + r * kDirectKeys + keys.begin + n * kTileRows, kDirectKeys, min_of(kHalf, count - r));
  }

  // Weights of 16 keys as two tiles: each with a zero after it and before it.
  static FA_INLINE void put_beside_zeros(index_t count, const Elem* p, Elem* to) {
    for (index_t r = 0; r < count; ++r, p += kDirectKeys, to += kTileDepth)
      Simd::store_beside_zeros(p, to, to + kTileElems);
  }

  // Runs work(tiles, n) for each tile n of keys, which adds to the first Count tiles: even and odd sums of `row`, then
  // of what is `next` elements after it.
  template <int Count, class Work>
  static FA_INLINE void sum_tiles(index_t tiles_of_keys, const Sums& to, Real* row, index_t next, const Work& work) {
    Tiles tiles;
    const index_t bytes = to.stride * index_t(sizeof(Real));
    const auto each_sum = [&](const auto& with) { each_part(with, std::make_integer_sequence<int, Count>()); };
    const auto sum = [&](int tile) { return row + tile % 2 * Simd::W + tile / 2 * next; };
    each_sum([&](auto tile) {
      if (to.fresh)
        tiles.template zero<tile>();
      else
        tiles.template load<tile>(sum(tile), bytes);
    });
    for (index_t n = 0; n < tiles_of_keys; ++n) work(tiles, n);
    each_sum([&](auto tile) { tiles.template store<tile>(sum(tile), bytes); });
  }

  // Features from `at` on for one half of queries: one part of kTileDepth or two.
  template <bool Two>
  static FA_INLINE void multiply_for_half(const Elem* weights, RowsAsTiles& from, index_t at, const Sums& to,
                                          Ahead& ahead) {
    sum_tiles<Two ? 4 : 2>(from.count(), to, to.data + at, kTileDepth, [&](Tiles& tiles, index_t n) {
      const Elem* const p = weights + n * 2 * kTileElems;
      tiles.template load<4>(p, kTileBytes);
      from.template load<5>(tiles, n, at, to.features);
      tiles.template multiply_add<0, 4, 5>();
      ask_for_tile(ahead);
      if constexpr (Two) {
        from.template load<6>(tiles, n, at + kTileDepth, to.features);
        tiles.template multiply_add<2, 4, 6>();
        ask_for_tile(ahead);
      }
      tiles.template load<4>(p + kTileElems, kTileBytes);
      tiles.template multiply_add<1, 4, 5>();
      if constexpr (Two) tiles.template multiply_add<3, 4, 6>();
    });
  }

  // kTileDepth features from `at` on for two halves of queries.
  static FA_INLINE void multiply_for_halves(const Elem* weights, RowsAsTiles& from, index_t at, const Sums& to,
                                            Ahead& ahead) {
    sum_tiles<4>(from.count(), to, to.data + at, kHalf * to.stride, [&](Tiles& tiles, index_t n) {
      const Elem* const p = weights + n * 4 * kTileElems;
      tiles.template load<4>(p, kTileBytes);
      from.template load<5>(tiles, n, at, to.features);
      tiles.template multiply_add<0, 4, 5>();
      tiles.template load<6>(p + kTileElems, kTileBytes);
      tiles.template multiply_add<1, 6, 5>();
      ask_for_tile(ahead);
      tiles.template load<4>(p + 2 * kTileElems, kTileBytes);
      tiles.template multiply_add<2, 4, 5>();
      tiles.template load<6>(p + 3 * kTileElems, kTileBytes);
      tiles.template multiply_add<3, 6, 5>();
    });
  }
};

}  // namespace flash_attn::cpu
