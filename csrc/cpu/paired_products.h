// Scores by fewer multiplications, where adders have nothing else to do: Winograd's inner product (S. Winograd, A New
// Algorithm for Inner Product, IEEE Transactions on Computers C-17, 1968),
//
//   q1 k1 + q2 k2 = (q1 + k2) (q2 + k1) - q1 q2 - k1 k2,
//
// in which products of features of one query, or of one key, are summed once for all that it meets. Of each four
// features the first two are such a pair, the others are multiplied as usual: as many multiply-adds and additions as a
// Zen 4 executes side by side (multiplies_by_adders in cpuid.h, docs/cpu-zen4.md).
//
// What cancels at last has been rounded: errors grow with |q|^2 + |k|^2 instead of |q| |k| (N. J. Higham, Accuracy and
// Stability of Numerical Algorithms, 23.2.1). Queries and keys that are too long for that, or not finite, are
// multiplied as usual; and so is fp32, whose results would show it.
#pragma once

#include "cpu/cpuid.h"
#include "cpu/pack.h"
#include "cpu/score_tables.h"

namespace flash_attn::cpu {

// Features of which the first two are a pair.
inline constexpr index_t kStepsPerPair = 4;

// The greatest (|q|^2 + |k|^2) * softmax_scale, of features in pairs, that goes in pairs. There the LSE of short
// queries with keys that are nearly the same, the worst case that was found, errs by 5e-6, and that of random numbers
// as without pairs; half of the last place of a result in fp16 is 2e-4 of it.
inline constexpr double kMostInPairs = 128;

// Targets that have these kernels: of fp32, with registers for two columns and two sums beside the accumulators.
template <class Target>
inline constexpr bool kHasPairs = Target::Simd::W == 16 && Target::kRows == 4 && Target::kPanelVectors == 4 &&
                                  std::is_same_v<typename Target::Format, Scalars<typename Target::Simd>> &&
                                  std::is_same_v<typename Target::Real, float>;

// Most features of which these kernels take pairs.
template <class Target>
inline constexpr index_t kMostPairedFeatures = kHasPairs<Target> ? kStepsPerSum<Target> : 0;

// Whether forward's strips compute scores in pairs. Where key blocks are packed in place, the number of threads decides
// on the rows of a strip, with which a row's result would change.
FA_INLINE bool takes_pairs(const Problem& p, Approach approach, index_t most_features) {
  return multiplies_by_adders() && p.dtype == DType::f16 && approach == Approach::packed && p.D <= most_features &&
         has_plain_scores(p) && !p.dropout.active;
}

// What is summed once: over the pairs of each row or column x1 x2, and for W at a time the greatest sum of x1^2 + x2^2,
// infinite if some are not finite.
template <class Target>
struct PairSums {
  using Elem = typename Target::Elem;
  static constexpr index_t W = Target::Simd::W;
  Elem *products, *squares;

  static FA_INLINE index_t elems(index_t columns) { return columns + round_up(columns / W, W); }
  static FA_INLINE PairSums at(Elem* memory, index_t columns) { return {memory, memory + columns}; }

  // Of `width` columns of a panel, the first of which is column `first`.
  void sum(const Elem* panel, index_t steps, index_t width, index_t first) const {
    using V = typename Target::Simd::V;
    using Simd = typename Target::Simd;
    const V infinity(std::numeric_limits<Elem>::infinity());
    for (index_t c = 0; c < width; c += W) {
      V of_products(Elem(0)), of_squares(Elem(0));
      for (index_t step = 0; step + kStepsPerPair <= steps; step += kStepsPerPair) {
        const V one = Simd::load(panel + step * width + c), two = Simd::load(panel + (step + 1) * width + c);
        of_products = fma(one, two, of_products);
        of_squares = fma(one, one, fma(two, two, of_squares));
      }
      Simd::store(products + first + c, of_products);
      squares[(first + c) / W] = Simd::reduce_max(select_less(of_squares, infinity, of_squares, infinity));
    }
  }
  // Of `count` rows, a multiple of W.
  void sum_rows(const Elem* rows, index_t stride, index_t count, index_t steps) const {
    alignas(64) Elem columns[kScalarsPerSum * W];
    for (index_t r = 0; r < count; r += W) {
      pack_transposed_panel<Target>({rows + r * stride, stride}, steps, W, columns);
      sum(columns, steps, W, r);
    }
  }
  // The greatest of columns [begin, end).
  Elem most_squares(Range columns) const {
    Elem most = 0;
    for (index_t n = columns.begin / W; n < ceil_div(columns.end, W); ++n) most = max_of(most, squares[n]);
    return most;
  }
};

// Scores of a strip with N vectors of keys at a time, in whole panels one after another or in a part of one.
template <class Target, int N, class Count, class Watch>
FA_NOINLINE void multiply_pairs(Count panels, index_t steps, StripA<typename Target::Elem> a, PanelPart<Target> b,
                                const typename Target::Elem* of_rows, const typename Target::Elem* of_columns,
                                typename Target::Real* c, index_t c_stride, Watch& watch) {
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  constexpr int MR = Target::kRows, W = Simd::W;
  Watch see = watch;  // A copy, which registers can hold.
  for (index_t panel = 0; panel < panels; ++panel, c += N * W, of_columns += N * W) {
    V sum[MR][N];
    for (int r = 0; r < MR; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] = V(-of_rows[r]) - Simd::load(of_columns + n * W);
    see.begin_panel();
    const auto* row = a.data;
    // The next step of the panel: an address that is added to, as registers are too few for one of each step.
    const auto next = [&] {
      b.data += b.step;
      FA_OPAQUE(b.data);
    };
    index_t left = steps;
    for (; left >= kStepsPerPair; left -= kStepsPerPair, row += kStepsPerPair) {
      V one[N], two[N];
      for (int n = 0; n < N; ++n) one[n] = Simd::load(b.data + n * W);
      next();
      for (int n = 0; n < N; ++n) two[n] = Simd::load(b.data + n * W);
      next();
      for (int r = 0; r < MR; ++r) {
        const V first(row[r * a.row_stride]), second(row[r * a.row_stride + 1]);
        for (int n = 0; n < N; ++n) sum[r][n] = fma(first + two[n], second + one[n], sum[r][n]);
      }
      for (int k = 2; k < kStepsPerPair; ++k) {
        for (int n = 0; n < N; ++n) one[n] = Simd::load(b.data + n * W);
        next();
        for (int r = 0; r < MR; ++r)
          for (int n = 0; n < N; ++n) sum[r][n] = Simd::add_product(row + r * a.row_stride + k, one[n], sum[r][n]);
      }
    }
    FA_OPAQUE(left);  // Three at most are no reason to have them unrolled.
    for (; left > 0; --left, ++row, next()) multiply_step<Target, N>(row, a.row_stride, b.data, sum);
    store_and_show<Target, N>(sum, c, c_stride, see);
  }
  watch = see;
}

// C = A * B over columns [first, last) of B, whole vectors; of_rows are products of A's rows, sums those of B's
// columns. Whole panels of the columns `watched` are shown to `watch`, and `watched` becomes those.
template <class Target, class Watch>
void multiply_in_pairs(const StripA<typename Target::Elem>& a, const Panels<Target>& b,
                       const typename Target::Elem* of_rows, const PairSums<Target>& sums, index_t first, index_t last,
                       typename Target::Real* c, index_t c_stride, Range& watched, Watch& watch) {
  constexpr index_t kPanel = Target::kPanel;
  constexpr int kVectors = Target::kPanelVectors;
  using One = std::integral_constant<index_t, 1>;
  const index_t begin = round_up(watched.begin, kPanel), whole = min_of(b.whole(), watched.end / kPanel);
  watched = begin < whole * kPanel ? Range{begin, whole * kPanel} : Range{first, first};
  NobodyWatches nobody;
  for (index_t column = first, panel = b.at(first); column < last;) {
    const auto* const of_columns = sums.products + column;
    auto* const to = c + (column - first);
    if (column == watched.begin && !watched.empty()) {
      const index_t panels = (watched.end - column) / kPanel;
      multiply_pairs<Target, kVectors>(panels, b.depth, a, {b.panel(panel), kPanel}, of_rows, of_columns, to, c_stride,
                                       watch);
      column = watched.end, panel += panels;
      continue;
    }
    const index_t end = min_of(b.begin(panel + 1), last);
    const PanelPart<Target> part{b.panel(panel) + (column - b.begin(panel)), b.width(panel)};
    with_width((end - column) / Target::Simd::W, [&](auto n) {
      multiply_pairs<Target, n>(One(), b.depth, a, part, of_rows, of_columns, to, c_stride, nobody);
    });
    column = end, ++panel;
  }
}

}  // namespace flash_attn::cpu
