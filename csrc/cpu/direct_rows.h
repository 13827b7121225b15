// Products with a few rows of K and V where they are in memory, for strips that meet each key once: nothing is packed.
// Rows are given by their addresses, so that pages cost nothing.
#pragma once

#include <cassert>

#include "cpu/direct_format.h"
#include "cpu/pack.h"
#include "cpu/rows_ahead.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

// Rows of K or V: those of a key head start `offset` elements after the addresses. `ahead` is what to ask for
// meanwhile.
struct DirectRows {
  const void* const* address;
  index_t offset;
  RowsToAsk ahead;

  template <class T>
  FA_INLINE const T* row(index_t n) const {
    return static_cast<const T*>(address[n]) + offset;
  }
};

// Loops over accumulators are unrolled here, since GCC 12 keeps arrays in memory whose loops it unrolls late.
template <int N, class Work>
FA_INLINE void each_of(Work&& work) {
  each_part(work, std::make_integer_sequence<int, N>());
}

// sum[i * N + k] += q[i] . row[k] over features [d, d + kLength); `left` is how many there are, if not all.
template <class Target, class T, int R, int N, class... Left>
FA_INLINE void dot_step(const typename Target::Elem* q, index_t q_stride, const T* const* row, index_t d,
                        typename Target::Simd::V* sum, Left... left) {
  using Direct = DirectFormat<Target, T>;
  decltype(Direct::load(row[0])) key[N];
  each_of<N>([&](auto k) { key[k] = Direct::load(row[k] + d, left...); });
  each_of<R>([&](auto i) {
    const auto query = Direct::load_query(q + i * q_stride + d, left...);
    each_of<N>([&](auto k) { sum[i * N + k] = Target::Format::multiply_add(query, key[k], sum[i * N + k]); });
  });
}

// Of q[i] . rows[min(n + k, last)], lane by lane, for R queries and N keys, in sets of Stride keys of all queries:
// sum[k / Stride * R * Stride + i * Stride + k % Stride]. Asks for as many lines as it reads.
template <class Target, class T, int R, int N, int Stride, class Into>
FA_INLINE LinesAhead<Into> dot_block(const typename Target::Elem* q, index_t q_stride, index_t D,
                                     const DirectRows& rows, index_t n, index_t last, typename Target::Simd::V* sum,
                                     LinesAhead<Into> ahead, bool asks) {
  using Direct = DirectFormat<Target, T>;
  using V = typename Target::Simd::V;
  constexpr index_t kLine = kCacheLine / index_t(sizeof(T));
  const index_t whole = D / Direct::kLength * Direct::kLength, lines = asks ? N * ceil_div(D, kLine) : 0;
  const int before = asks && !Into::kAfterProducts ? N : 0;  // Lines to ask for before the products with a line.
  const T* row[N];
  each_of<N>([&](auto k) { row[k] = rows.row<T>(min_of(n + k, last)); });
  V part[R * N];
  each_of<R * N>([&](auto i) { part[i] = V(typename Target::Real(0)); });
  for (index_t d = 0; d < whole; d += Direct::kLength) {
    for (int k = 0; k < before && d % kLine == 0; ++k) ahead.ask();
    dot_step<Target, T, R, N>(q, q_stride, row, d, part);
  }
  if (whole < D) {
    for (int k = 0; k < before && whole % kLine == 0; ++k) ahead.ask();
    dot_step<Target, T, R, N>(q, q_stride, row, whole, part, D - whole);
  }
  for (index_t line = 0; line < lines && Into::kAfterProducts; ++line) ahead.ask();
  each_of<R * N>([&](auto i) {
    constexpr int query = i / N, k = i % N;
    sum[(k / Stride * R + query) * Stride + k % Stride] = part[i];
  });
  return ahead;
}

// Queries that meet rows of memory at a time, so that what is loaded and converted serves them all, and the keys of a
// turn: with AVX-512 those of one reduction, whose sums stay in registers.
inline constexpr int kQueriesAtOnce = 4;
template <class Target, int Rows>
inline constexpr int kKeysAtOnce = Target::Simd::W == 16 ? 16 / min_of(Rows, kQueriesAtOnce) : 8;
// Keys read side by side, four at most: more are more than prefetchers follow. NEON has registers for several vectors.
template <class Target, int OfVector>
inline constexpr int kBlockOfKeys = Target::Simd::W < 8 ? 4 : min_of(OfVector, 4);

// scores[r * kDirectKeys + n] = q[r] . rows[n] for R queries and as many n from `first` as one turn has, below `end`;
// only the first queries of a strip ask for what comes next. What is summed lane by lane waits in memory for the others
// of the turn: a reduction by itself would wait for its own results.
template <class Target, class T, int R, int Keys, class Into>
FA_INLINE LinesAhead<Into> dot_turn(const typename Target::Elem* q, index_t q_stride, index_t D, const DirectRows& rows,
                                    index_t first, index_t end, typename Target::Real* scores, LinesAhead<Into> ahead,
                                    bool asks) {
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  constexpr int W = Simd::W, N = W / R, kBlock = kBlockOfKeys<Target, N>, kSums = Keys / N;
  static_assert(W % R == 0 && Keys % kBlock == 0 && Keys % N == 0);
  V sum[kSums * W];
  if (kSums == 1 || first + Keys > end) each_of<kSums * W>([&](auto i) { sum[i] = V(typename Target::Real(0)); });
  // Not a lambda for both: GCC 12 inlines none that is called twice, and would keep `ahead` in memory for it.
  if constexpr (kSums == 1)
    each_of<N / kBlock>([&](auto block) {
      constexpr int k = block * kBlock;
      if (k == 0 || first + k < end)
        ahead = dot_block<Target, T, R, kBlock, N>(q, q_stride, D, rows, first + k, end - 1, sum + k, ahead, asks);
    });
  else
    for (int k = 0; k < Keys && first + k < end; k += kBlock)
      ahead = dot_block<Target, T, R, kBlock, N>(q, q_stride, D, rows, first + k, end - 1, sum + k / N * W + k % N,
                                                 ahead, asks);
  alignas(64) typename Target::Real sums[kSums * W];
  each_of<kSums>([&](auto i) { Simd::store(sums + i * W, Simd::sum_each(sum + i * W)); });
  for (int n = 0; n < Keys; n += N)
    for (int i = 0; i < R; ++i) {
      auto* const to = scores + i * kDirectKeys + first + n;
      const auto* const from = sums + n * R + i * N;
      if (first + n + N <= end)
        std::memcpy(to, from, N * sizeof(*sums));
      else if (first + n < end)
        std::memcpy(to, from, static_cast<std::size_t>(end - first - n) * sizeof(*sums));
    }
  return ahead;
}

// The same for Rows queries of a strip and n in [begin, end).
template <class Target, class T, int Rows, class Into>
void dot_rows(const typename Target::Elem* q, index_t q_stride, index_t D, const DirectRows& rows, index_t begin,
              index_t end, typename Target::Real* scores) {
  constexpr int R = min_of(Rows, kQueriesAtOnce), kRest = Rows % R, Keys = kKeysAtOnce<Target, Rows>;
  LinesAhead<Into> ahead(rows.ahead);
  for (index_t n = begin; n < end; n += Keys) {
    for (int r = 0; r < Rows - kRest; r += R)
      ahead = dot_turn<Target, T, R, Keys>(q + r * q_stride, q_stride, D, rows, n, end, scores + r * kDirectKeys, ahead,
                                           r == 0);
    if constexpr (kRest > 0)
      ahead = dot_turn<Target, T, kRest, Keys>(q + (Rows - kRest) * q_stride, q_stride, D, rows, n, end,
                                               scores + (Rows - kRest) * kDirectKeys, ahead, false);
  }
}

// Sums over keys are kept as the instructions leave them, in rows of whole pairs of vectors.
template <class Target>
FA_INLINE index_t sums_stride(index_t features) {
  return round_up(features, 2 * Target::Simd::W);
}

// sums[r][at .. at + N * W) += sum over n in [begin, end) of p[r * kDirectKeys + n] * rows[n][at ..]; p is 0 at `end`
// where kStep does not divide it. Fresh: they are 0 before. Whole: there are that many features.
template <class Target, class T, int Rows, class Into, int N, bool Whole>
FA_NOINLINE void accumulate_columns(const typename Target::Elem* p, const DirectRows& rows, index_t begin, index_t end,
                                    index_t at, index_t features, typename Target::Real* sums, bool fresh,
                                    LinesAhead<Into>& lines_ahead) {
  using Direct = DirectFormat<Target, T>;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  constexpr index_t kStep = Target::Format::kStep, kWidth = N * Simd::W;
  constexpr index_t kLine = kCacheLine / index_t(sizeof(T));
  const index_t stride = sums_stride<Target>(features);
  // Of a step: as many as it reads.
  const index_t columns = Whole ? kWidth : min_of(kWidth, features - at);
  const index_t lines = kWidth >= kLine || at % kLine == 0 ? ceil_div(columns, kLine) * kStep : 0;
  LinesAhead<Into> ahead = lines_ahead;
  V sum[Rows][N];
  each_of<Rows>([&](auto r) { each_of<N>([&](auto c) { sum[r][c] = V(typename Target::Real(0)); }); });
  if (!fresh)
    each_of<Rows>(
        [&](auto r) { each_of<N>([&](auto c) { sum[r][c] = Simd::load(sums + r * stride + at + c * Simd::W); }); });
  for (index_t n = begin; n < end; n += kStep) {
    const index_t last = min_of(n + kStep - 1, end - 1);
    const T* const row[2] = {rows.row<T>(n), rows.row<T>(last)};
    if constexpr (!Into::kAfterProducts)
      for (index_t line = 0; line < lines; ++line) ahead.ask();
    decltype(Direct::load(row[0])) column[N];
    for (int c = 0; c < N; c += Direct::kVectors) {
      const index_t from = at + c * Simd::W;
      if constexpr (Whole)
        Direct::columns(row, from, column + c);
      else
        Direct::columns(row, min_of(from, features), column + c, max_of<index_t>(features - from, 0));
    }
    each_of<Rows>([&](auto r) {
      const auto weight = Target::Format::broadcast(p + r * kDirectKeys + n);
      each_of<N>([&](auto c) { sum[r][c] = Target::Format::multiply_add(weight, column[c], sum[r][c]); });
    });
    if constexpr (Into::kAfterProducts)
      for (index_t line = 0; line < lines; ++line) ahead.ask();
  }
  // Addresses of the sums are not kept over the products, which need the registers.
  index_t to_row = stride;
  FA_OPAQUE(to_row);
  each_of<Rows>(
      [&](auto r) { each_of<N>([&](auto c) { Simd::store(sums + r * to_row + at + c * Simd::W, sum[r][c]); }); });
  lines_ahead = ahead;
}

// Vectors of a row of V that meet as many rows of weights at a time: for a few rows more than for a strip, whose
// accumulators fill the registers, as sums wait for their own last products.
template <class Target, int Rows>
inline constexpr int kColumnsAtOnce = max_of(Target::kPanelVectors, min_of(4, 8 / Rows));

// sums[r] += sum over n in [begin, end) of p[r * kDirectKeys + n] * rows[n] for Rows queries of a strip; begin is a
// multiple of kStep. Fresh: sums are 0 before.
template <class Target, class T, int Rows, class Into>
void accumulate_rows(const typename Target::Elem* p, const DirectRows& rows, index_t begin, index_t end,
                     index_t features, typename Target::Real* sums, bool fresh) {
  constexpr index_t W = Target::Simd::W;
  constexpr int kWide = kColumnsAtOnce<Target, Rows>, kVectors = DirectFormat<Target, T>::kVectors;
  LinesAhead<Into> ahead(rows.ahead);
  index_t at = 0;
  for (; at + kWide * W <= features; at += kWide * W)
    accumulate_columns<Target, T, Rows, Into, kWide, true>(p, rows, begin, end, at, features, sums, fresh, ahead);
  const index_t left = ceil_div(features - at, kVectors * W);
  each_of<kWide / kVectors>([&](auto n) {
    constexpr int N = (decltype(n)::value + 1) * kVectors;
    if (left * kVectors == N)
      accumulate_columns<Target, T, Rows, Into, N, false>(p, rows, begin, end, at, features, sums, fresh, ahead);
  });
}

// o[r] += sums[r], which lie as in Direct's columns.
template <class Target, class Direct>
FA_INLINE void add_rows_of_sums(index_t rows, const typename Target::Real* sums, index_t features,
                                typename Target::Real* o, index_t o_stride) {
  using Simd = typename Target::Simd;
  for (index_t r = 0; r < rows; ++r, o += o_stride, sums += sums_stride<Target>(features))
    for (index_t at = 0; at < features; at += Direct::kVectors * Simd::W) {
      typename Simd::V part[Direct::kVectors];
      for (int c = 0; c < Direct::kVectors; ++c) part[c] = Simd::load(sums + at + c * Simd::W);
      Direct::in_order(part);
      for (int c = 0; c < Direct::kVectors && at + c * Simd::W < features; ++c)
        Simd::store(o + at + c * Simd::W, Simd::load(o + at + c * Simd::W) + part[c]);
    }
}

template <class Target, class T, int Rows>
void add_sums(const typename Target::Real* sums, index_t features, typename Target::Real* o, index_t o_stride) {
  add_rows_of_sums<Target, DirectFormat<Target, T>>(Rows, sums, features, o, o_stride);
}

// The products for a tensor's dtype, chosen once per call; none for tiles.
template <class Target>
struct DirectProducts {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  struct OfRows {
    void (*dots)(const Elem* q, index_t q_stride, index_t D, const DirectRows& rows, index_t begin, index_t end,
                 Real* scores);
    void (*accumulate)(const Elem* p, const DirectRows& rows, index_t begin, index_t end, index_t features, Real* sums,
                       bool fresh);
    void (*add)(const Real* sums, index_t features, Real* o, index_t o_stride);
  };
  OfRows one, two, four, strip;

  // Of a strip that has so many rows: with few, as of heads that share their keys with few others, it has no empty rows
  // beside them.
  FA_INLINE const OfRows& of(index_t rows) const {
    return rows == 1 ? one : rows == 2 ? two : rows <= 4 ? four : strip;
  }
};

// Instructions to idle for each line, where products have the pace of memory; shorter vectors and what is converted
// take long enough. Into L2: measured on a Zen 4. Into L1: measured on a Zen 5, where products of pairs take long
// enough.
template <class Target, class T>
inline constexpr int kIdleIntoL2 = Target::Simd::W == 16 && std::is_same_v<typename Target::Elem, T> ? 8 : 0;
template <class Target, class T>
inline constexpr int kIdleIntoL1 = Target::Simd::W == 16 && std::is_same_v<T, float> ? 18 : 0;

template <class Target, class T, int Rows, class Into>
constexpr typename DirectProducts<Target>::OfRows direct_products_of_rows() {
  return {dot_rows<Target, T, Rows, Into>, accumulate_rows<Target, T, Rows, Into>, add_sums<Target, T, Rows>};
}

// Few: how one and two rows ask, whose products are so quick that a line's address that goes through memory is waited
// for.
template <class Target, class T, class Into, class Few = Into>
constexpr DirectProducts<Target> direct_products_that_ask() {
  constexpr int kTwo = Target::kPortable ? Target::kRows : 2;
  return {direct_products_of_rows<Target, T, 1, Few>(), direct_products_of_rows<Target, T, kTwo, Few>(),
          direct_products_of_rows<Target, T, 4, Into>(), direct_products_of_rows<Target, T, Target::kRows, Into>()};
}

template <class Target, class T>
DirectProducts<Target> direct_products_measured(Asking asking) {
  switch (asking) {
    case Asking::into_l2_at_its_pace:
      if constexpr (kIdleIntoL2<Target, T> > 0)
        return direct_products_that_ask<Target, T, AtItsPace<IntoL2, kIdleIntoL2<Target, T>>, IntoL2>();
      [[fallthrough]];
    case Asking::into_l2: return direct_products_that_ask<Target, T, IntoL2>();
    case Asking::into_l1_at_its_pace:
      if constexpr (kIdleIntoL1<Target, T> > 0)
        return direct_products_that_ask<Target, T, AtItsPace<IntoL1FromMemory, kIdleIntoL1<Target, T>>>();
      [[fallthrough]];
    case Asking::into_l1_from_memory: return direct_products_that_ask<Target, T, IntoL1FromMemory>();
    default: return direct_products_that_ask<Target, T, IntoL1>();
  }
}

template <class Target, class T>
DirectProducts<Target> direct_products_of(Asking asking) {
  if constexpr (Target::kPortable) {
    assert(asking == Asking::into_l1);
    return direct_products_that_ask<Target, T, IntoL1>();
  } else {
    return direct_products_measured<Target, T>(asking);
  }
}

template <class Target>
DirectProducts<Target> direct_products([[maybe_unused]] DType dtype, [[maybe_unused]] Asking asking) {
  if constexpr (Target::kTiled || Target::kDirectTiles) {
    return {};
  } else if constexpr (std::is_same_v<typename Target::Real, double>) {
    return direct_products_of<Target, double>(asking);
  } else if constexpr (std::is_same_v<typename Target::Elem, BFloat16>) {
    return direct_products_of<Target, BFloat16>(asking);
  } else {
    if (dtype == DType::f16) return direct_products_of<Target, Half>(asking);
    if (dtype == DType::bf16) return direct_products_of<Target, BFloat16>(asking);
    return direct_products_of<Target, float>(asking);
  }
}

}  // namespace flash_attn::cpu
