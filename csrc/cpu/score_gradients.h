// dS^T of a key block: written by strips of kRows keys with queries in the lanes, read as the A operand of dQ += dS K.
//
// Vector targets read A one k-step at a time, so kStep keys of one query are neighbours. Tile targets read rows of k,
// so all keys of one query are.
#pragma once

#include "cpu/gemm.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

template <class Target>
class ScoreGradients {
  using Elem = typename Target::Elem;
  using Format = typename Target::Format;
  using V = typename Target::Simd::V;
  static constexpr index_t W = Target::Simd::W, kStep = Format::kStep, kRows = Target::kRows;
  static constexpr index_t kParts = Target::kParts;

 public:
  static FA_INLINE index_t elems(index_t keys, index_t queries) {
    return kParts * round_up(keys, kRows) * (queries + kRows);
  }
  FA_INLINE ScoreGradients(Elem* data, index_t keys, index_t queries)
      : data_(data),
        query_stride_(Target::kTiled ? kParts * round_up(keys, kRows) : kStep),
        step_stride_(Target::kTiled ? kStep : (queries + kRows) * kStep) {}

  // Of the strip that begins at key n: queries [begin, end), multiples of W.
  FA_INLINE void clear(index_t n, index_t begin, index_t end) const {
    if constexpr (Target::kTiled) {
      for (index_t i = begin; i < end; ++i)
        for (index_t part = 0; part < kParts; ++part) std::memset(at(n, i) + part * of_part(), 0, kRows * sizeof(Elem));
    } else {
      V zeros[kRows];
      for (V& zero : zeros) zero = V(typename Target::Real(0));
      for (index_t i = begin; i < end; i += W) store(n, i, zeros);
    }
  }
  // Queries i .. i + W - 1 of the strip that begins at key n.
  FA_INLINE void store(index_t n, index_t i, const V (&ds)[kRows]) const {
    if constexpr (Target::kTiled) {
      static_assert(kRows == W * kStep);
      alignas(64) Elem steps[kParts][kRows * W];
      for (int t = 0; t < kRows; t += 2)
        Format::each_part(ds[t], ds[t + 1],
                          [&](int part, V x, V y) { Format::store_pairs(steps[part] + t * W, x, y); });
      for (index_t part = 0; part < kParts; ++part)
        Format::transpose(steps[part], kStep * W, at(n, i) + part * of_part(), query_stride_);
    } else {
      for (index_t t = 0; t < kRows; t += kStep) Format::store_step(at(n + t, i), ds + t);
    }
  }
  // Rows from query i on, k from key n on, a multiple of kDepth.
  FA_INLINE StripA<Elem> rows(index_t i, index_t n) const { return {at(n, i), query_stride_, step_stride_}; }

 private:
  FA_INLINE index_t of_part() const { return query_stride_ / kParts; }  // From a part of a row to the next, in tiles.
  FA_INLINE Elem* at(index_t key, index_t query) const {
    return data_ + key / kStep * step_stride_ + query * query_stride_;
  }

  Elem* data_;
  index_t query_stride_, step_stride_;
};

}  // namespace flash_attn::cpu
