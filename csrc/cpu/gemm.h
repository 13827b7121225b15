// The one micro-kernel: a strip of MR rows times a packed panel. It serves QK and PV forward and all five products
// backward.
//
//   C[r][c] (+)= sum over k of A[r][k] * B[k][c],   r < MR, c < N * W
//
// A is broadcast one k-step at a time and may have any strides; B is packed so that a k-step of a panel is contiguous.
// A multiplicand format (multiplicands.h) says what a k-step is: one number (Scalars), or a pair of bf16 (Bf16Pairs,
// 512-bit dot products).
#pragma once

#include <type_traits>
#include <utility>

#include "core/range.h"
#include "cpu/multiplicands.h"

namespace flash_attn::cpu {

// Where the elements of A are: A[r][k-step] = data[r * row_stride + step * step_stride].
// Strides may be constants that the compiler knows.
template <class Elem, class RowStride = index_t, class StepStride = index_t>
struct StripA {
  const Elem* data;
  RowStride row_stride;
  StepStride step_stride;
};

// Steps that are summed by themselves before they join C: a running fp32 sum over a thousand keys would round more than
// plain matrix products do; over 128, errors are as large as torch's. Sums begin at multiples of this many steps of B,
// wherever the product begins, so that leading zeros of A change no bit of C.
template <class Target>
inline constexpr index_t kStepsPerSum = Target::Format::kStepsPerSum;

// Zeros at the ends of A may be left out in multiples of this, whole steps of each chain below.
template <class Target>
inline constexpr index_t kDepthCut = max_of<index_t>(2 * Target::Format::kStep, Target::kDepth);

// A narrow panel has too few accumulators to hide the latency of its products: neighbouring steps then go to different
// ones. Only where C accumulates, so that scores come out alike forward and backward, whose panels differ in width.
template <class Target, int N, bool Accumulate>
inline constexpr int kChains = Accumulate && N * Target::kRows <= 8 ? 2 : 1;

// Whether loops over k-steps are unrolled. A core that runs another thread too takes in half as many instructions a
// cycle: those of 12 products of 256 bits, with a loop's own, cost a Zen 3 up to a tenth then (docs/cpu-avx2.md). 16 of
// 512 bits take longer than all of theirs.
template <class Target>
inline constexpr bool kUnrolls = Target::Simd::W == 8 && !Target::kPortable;

// Work that runs inside of products, in the pipelines that they leave idle: beside(integral_constant<int, i>) for i = 0
// .. kParts - 1 in turn, kPartsOfStep in each k-step, as long as there is more(). In small parts, so that few
// instructions in a row wait for each other: a core that runs another thread too looks half as far ahead (Software
// Optimization Guide for the AMD Zen4 Microarchitecture, on resources that are partitioned).
struct NothingBeside {
  static constexpr int kParts = 0;
};
inline constexpr int kPartsOfStep = 2;

template <class Work, int... Parts>
FA_INLINE void each_part(Work&& work, std::integer_sequence<int, Parts...>) {
  (work(std::integral_constant<int, Parts>()), ...);
}

// One k-step of a panel of N vectors into its sums, with after_row(integral_constant<int, r>) after the products of
// row r.
template <class Target, int N, class AfterRow>
FA_INLINE void multiply_step(const typename Target::Elem* a, index_t row_stride, const typename Target::Elem* b,
                             typename Target::Simd::V (&sum)[Target::kRows][N], const AfterRow& after_row) {
  using Format = typename Target::Format;
  decltype(Format::load(b)) column[N];
  for (int n = 0; n < N; ++n) column[n] = Format::load(b + n * Target::Simd::W * Format::kStep);
  each_part(
      [&](auto r) {
        const auto row = Format::broadcast(a + r * row_stride);
        for (int n = 0; n < N; ++n) sum[r][n] = Format::multiply_add(row, column[n], sum[r][n]);
        after_row(r);
      },
      std::make_integer_sequence<int, Target::kRows>());
}
// A default argument above, and a reference where a pack is below, made all of forward 1 to 3 % slower (GCC 12).
template <class Target, int N>
FA_INLINE void multiply_step(const typename Target::Elem* a, index_t row_stride, const typename Target::Elem* b,
                             typename Target::Simd::V (&sum)[Target::kRows][N]) {
  multiply_step<Target, N>(a, row_stride, b, sum, [](auto) {});
}

// N vectors of columns of a panel whose k-steps are b_step elements apart. Of a C that
// accumulates and is fresh it is of no matter what it held.
template <class Target, int N, bool Accumulate, class A, class Beside = NothingBeside>
FA_INLINE void multiply_panel(index_t first_step, index_t last_step, A a, const typename Target::Elem* b,
                              index_t b_step, typename Target::Real* c, index_t c_stride, bool fresh = false,
                              Beside&& beside = {}) {
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  constexpr int MR = Target::kRows, W = Simd::W, Chains = kChains<Target, N, Accumulate>;
  using Work = std::remove_reference_t<Beside>;
  Work work = beside;  // A copy, which registers can hold.
  bool accumulate = Accumulate && !fresh;
  for (index_t step = first_step; step < last_step; accumulate = true) {
    const index_t end = min_of(last_step, (step / kStepsPerSum<Target> + 1) * kStepsPerSum<Target>);
    V sum[Chains][MR][N];
    for (auto& chain : sum)
      for (int r = 0; r < MR; ++r)
        for (int n = 0; n < N; ++n) chain[r][n] = V(typename Target::Real(0));
    const auto one_step = [&](V(&chain)[MR][N], auto... after_row) {
      multiply_step<Target, N>(a.data, a.row_stride, b, chain, after_row...);
      a.data += a.step_stride;
      b += b_step;
    };
    if constexpr (Work::kParts > 0) {
      constexpr int Steps = Work::kParts / kPartsOfStep, Rows = MR / kPartsOfStep;
      static_assert(Steps * kPartsOfStep == Work::kParts && Rows * kPartsOfStep == MR);
      for (; work.more() && step + Steps <= end; step += Steps)
        each_part(
            [&](auto i) {
              one_step(sum[i % Chains], [&](auto r) {
                constexpr int part = decltype(i)::value * kPartsOfStep + r / Rows;
                if constexpr (r % Rows == Rows - 1) work(std::integral_constant<int, part>());
              });
            },
            std::make_integer_sequence<int, Steps>());
    }
    if constexpr (Chains == 1 && kUnrolls<Target>) {
      FA_UNROLL_BY_4
      for (; step < end; ++step) one_step(sum[0]);
    }
    for (; step + Chains <= end; step += Chains)
      for (auto& chain : sum) one_step(chain);
    for (; step < end; ++step) one_step(sum[0]);
    // The addresses of C's rows are not kept over the products. It would be in vector registers, for want of others,
    // and while stores wait for theirs from there, so do the loads of the next panel.
    index_t stride = c_stride;
    FA_OPAQUE(stride);
    auto* to = c;
    for (int r = 0; r < MR; ++r, to += stride)
      for (int n = 0; n < N; ++n) {
        V total = sum[0][r][n];
        for (int chain = 1; chain < Chains; ++chain) total = total + sum[chain][r][n];
        Simd::store(to + n * W, accumulate ? Simd::load(to + n * W) + total : Simd::from_products(total));
      }
  }
  beside = work;
}

// A packed B of `depth` k (a multiple of kStep) by `columns` (a multiple of W): panels of Target::kPanel columns one
// after another, the last one as wide as what is left; inside a panel k-steps, inside a k-step columns, inside a column
// its k. Numbers in parts have them one after another in depth, each as deep as the matrix. A single vector would not
// fill the pipelines: where one is left, the last panel takes another from the one before.
template <class Target>
struct Panels {
  using Elem = typename Target::Elem;
  static constexpr index_t kStep = Target::Format::kStep, kPanel = Target::kPanel, W = Target::Simd::W;

  Elem* data;
  index_t depth, columns;

  FA_INLINE index_t count() const { return ceil_div(columns, kPanel); }
  FA_INLINE index_t begin(index_t panel) const {
    return min_of(panel * kPanel - (lends() && panel == count() - 1 ? W : 0), columns);
  }
  FA_INLINE index_t whole() const { return columns / kPanel - (lends() ? 1 : 0); }  // Panels of kPanel columns.
  FA_INLINE index_t width(index_t panel) const { return begin(panel + 1) - begin(panel); }
  FA_INLINE Elem* panel(index_t index) const { return data + begin(index) * depth; }
  // The panel that holds a column.
  FA_INLINE index_t at(index_t column) const {
    return lends() && column >= begin(count() - 1) ? count() - 1 : column / kPanel;
  }

 private:
  FA_INLINE bool lends() const { return Target::kPanelVectors >= 3 && columns > kPanel && columns % kPanel == W; }
};

// A function of its own where work runs beside the products: as a part of its caller, or of one with other widths, the
// compiler (GCC 12) finds too few registers for it, which tools/cpu_loops.py would show.
template <class Target, int N, bool Accumulate, class A, class Beside>
FA_NOINLINE void multiply_panel_apart(index_t from, index_t to, A a, const typename Target::Elem* b, index_t b_step,
                                      typename Target::Real* c, index_t c_stride, bool fresh, Beside& beside) {
  multiply_panel<Target, N, Accumulate>(from, to, a, b, b_step, c, c_stride, fresh, beside);
}

// work(integral_constant<int, N>) for so many vectors of a panel.
template <class Work>
FA_INLINE void with_width(index_t vectors, const Work& work) {
  switch (vectors) {
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    default: return work(std::integral_constant<int, 4>());
  }
}

template <class Target, bool Accumulate, class A, class Beside = NothingBeside>
FA_INLINE void multiply_panel_of(index_t vectors, index_t from, index_t to, A a, const typename Target::Elem* b,
                                 index_t b_step, typename Target::Real* c, index_t c_stride, bool fresh = false,
                                 Beside&& beside = {}) {
  with_width(vectors, [&](auto width) {
    constexpr int N = width;
    if constexpr (N > Target::kPanelVectors)
      return;
    else if constexpr (std::remove_reference_t<Beside>::kParts > 0)
      multiply_panel_apart<Target, N, Accumulate>(from, to, a, b, b_step, c, c_stride, fresh, beside);
    else
      multiply_panel<Target, N, Accumulate>(from, to, a, b, b_step, c, c_stride, fresh, beside);
  });
}

// What sees the results of products on their way to C: watch(row, vector), and is told of each whole panel before that.
struct NobodyWatches {
  FA_INLINE void begin_panel() {}
  template <class V>
  FA_INLINE void operator()(int, V) const {}
};

// Sums of a strip on their way to C, shown to `see`.
template <class Target, int N, class Watch>
FA_INLINE void store_and_show(const typename Target::Simd::V (&sum)[Target::kRows][N], typename Target::Real* c,
                              index_t c_stride, Watch& see) {
  using Simd = typename Target::Simd;
  FA_OPAQUE(c_stride);  // As in multiply_panel.
  for (int r = 0; r < Target::kRows; ++r, c += c_stride)
    for (int n = 0; n < N; ++n) {
      Simd::store(c + n * Simd::W, Simd::from_products(sum[r][n]));
      see(r, sum[r][n]);
    }
}

// C = A * B for whole panels in a row whose depth is one sum, to the bit what multiply_panel computes. Out of line,
// where registers suffice for all that the next panel needs.
template <class Target, class Watch>
FA_NOINLINE void multiply_panels(index_t panels, index_t steps, StripA<typename Target::Elem> a,
                                 const typename Target::Elem* b, typename Target::Real* c, index_t c_stride,
                                 Watch& watch) {
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  constexpr int MR = Target::kRows, N = Target::kPanelVectors, W = Simd::W;
  Watch see = watch;  // A copy, which registers can hold.
  for (index_t panel = 0; panel < panels; ++panel, c += N * W) {
    V sum[MR][N];
    for (auto& row : sum)
      for (V& vector : row) vector = V(typename Target::Real(0));
    see.begin_panel();
    const auto* step = a.data;
    const auto one_step = [&] {
      multiply_step<Target, N>(step, a.row_stride, b, sum);
      step += a.step_stride, b += N * W * Target::Format::kStep;
    };
    if constexpr (kUnrolls<Target>) {
      FA_UNROLL_BY_4
      for (index_t i = 0; i < steps; ++i) one_step();
    } else {
      for (index_t i = 0; i < steps; ++i) one_step();
    }
    store_and_show<Target, N>(sum, c, c_stride, see);
  }
  watch = see;
}

// A part of a panel of no more vectors than this is computed together with a whole panel beside it: by itself it has
// too few accumulators to hide the latency of its products. More do not fit in the registers beside a panel of four; of
// NEON's GCC 12 has 10 to 22 instructions on the stack.
template <class Target>
inline constexpr int kJoins = Target::Simd::W == 16 && Target::kPanelVectors == 4 ? 2 : 0;

// Columns of one panel of B, whose k-steps are `step` elements apart.
template <class Target>
struct PanelPart {
  const typename Target::Elem* data;
  index_t step;
};

// The same for parts of two panels side by side, of L and R vectors; the one that is whole is watched.
template <class Target, int L, int R, class Watch>
FA_NOINLINE void multiply_neighbours(index_t steps, StripA<typename Target::Elem> a, PanelPart<Target> left,
                                     PanelPart<Target> right, typename Target::Real* c, index_t c_stride,
                                     Watch& watch) {
  using Simd = typename Target::Simd;
  using Format = typename Target::Format;
  using V = typename Simd::V;
  constexpr int MR = Target::kRows, N = L + R, W = Simd::W;
  Watch see = watch;
  V sum[MR][N];
  for (auto& row : sum)
    for (V& vector : row) vector = V(typename Target::Real(0));
  see.begin_panel();
  for (index_t i = 0; i < steps; ++i, a.data += a.step_stride, left.data += left.step, right.data += right.step) {
    decltype(Format::load(left.data)) column[N];
    for (int n = 0; n < N; ++n)
      column[n] = Format::load(n < L ? left.data + n * W * Format::kStep : right.data + (n - L) * W * Format::kStep);
    for (int r = 0; r < MR; ++r) {
      const auto row = Format::broadcast(a.data + r * a.row_stride);
      for (int n = 0; n < N; ++n) sum[r][n] = Format::multiply_add(row, column[n], sum[r][n]);
    }
  }
  index_t stride = c_stride;
  FA_OPAQUE(stride);  // As in multiply_panel.
  for (int r = 0; r < MR; ++r, c += stride)
    for (int n = 0; n < N; ++n) {
      Simd::store(c + n * W, Simd::from_products(sum[r][n]));
      if ((n < L) == (L > R)) see(r, sum[r][n]);
    }
  watch = see;
}

// Such parts of one or two vectors, before a whole panel or after it; column `first` is the first of both.
template <class Target, class Watch>
FA_INLINE void multiply_joined(index_t vectors, bool before, const Panels<Target>& b, index_t panel, index_t first,
                               const StripA<typename Target::Elem>& a, typename Target::Real* c, index_t c_stride,
                               Watch& watch) {
  if constexpr (kJoins<Target> == 2) {
    constexpr index_t kStep = Target::Format::kStep;
    constexpr int kWhole = Target::kPanelVectors;
    const index_t steps = b.depth / kStep;
    const PanelPart<Target> left{b.panel(panel) + (first - b.begin(panel)) * kStep, b.width(panel) * kStep};
    const PanelPart<Target> right{b.panel(panel + 1), b.width(panel + 1) * kStep};
    if (before)
      vectors == 1 ? multiply_neighbours<Target, 1, kWhole>(steps, a, left, right, c, c_stride, watch)
                   : multiply_neighbours<Target, 2, kWhole>(steps, a, left, right, c, c_stride, watch);
    else
      vectors == 1 ? multiply_neighbours<Target, kWhole, 1>(steps, a, left, right, c, c_stride, watch)
                   : multiply_neighbours<Target, kWhole, 2>(steps, a, left, right, c, c_stride, watch);
  }
}

// C[0..MR) += or = A * B over columns [first, last), whole vectors, and k in [k_begin, k_end), both multiples of kStep;
// a starts at k_begin, c at column `first`. Of the panels at the edges only what is asked for is computed. Whole panels
// of the columns `watched` are shown to `watch` on their way to C, if C is not accumulated; `watched` becomes those.
template <class Target, bool Accumulate, class Watch>
void multiply_watched(const StripA<typename Target::Elem>& a, const Panels<Target>& b, index_t k_begin, index_t k_end,
                      index_t first, index_t last, typename Target::Real* c, index_t c_stride, Range& watched,
                      Watch& watch, bool fresh) {
  constexpr index_t kStep = Target::Format::kStep, W = Target::Simd::W, kPanel = Target::kPanel;
  constexpr index_t kNarrow = kJoins<Target> * W;
  index_t column = first, panel = b.at(first);
  const auto to = [&] { return c + (column - first); };
  const auto end_of_panel = [&] { return min_of(b.begin(panel + 1), last); };
  if constexpr (!Accumulate) {
    const index_t begin = round_up(watched.begin, kPanel);
    const index_t panels = min_of(b.whole(), watched.end / kPanel) - begin / kPanel;
    const bool one_sum = k_begin == 0 && k_end == b.depth && k_end <= kStepsPerSum<Target> * kStep;
    watched = one_sum && panels > 0 ? Range{begin, begin + panels * kPanel} : Range{first, first};
  }
  while (column < last) {
    if constexpr (!Accumulate) {
      if (column < watched.begin && watched.begin <= column + kNarrow && watched.begin == end_of_panel()) {
        multiply_joined((watched.begin - column) / W, true, b, panel, column, a, to(), c_stride, watch);
        column = watched.begin + kPanel, panel += 2;
        continue;
      }
      if (watched.begin <= column && column < watched.end) {
        index_t whole = (watched.end - column) / kPanel;
        const index_t after = min_of(b.begin(min_of(panel + whole + 1, b.count())), last) - watched.end;
        const bool joins = 0 < after && after <= kNarrow;
        whole -= joins ? 1 : 0;
        if (whole > 0) multiply_panels<Target>(whole, k_end / kStep, a, b.panel(panel), to(), c_stride, watch);
        column += whole * kPanel, panel += whole;
        if (!joins) continue;
        multiply_joined(after / W, false, b, panel, column, a, to(), c_stride, watch);
        column += kPanel + after, panel += 2;
        continue;
      }
    }
    const index_t begin = b.begin(panel), width = b.width(panel), end = end_of_panel();
    multiply_panel_of<Target, Accumulate>((end - column) / W, k_begin / kStep, k_end / kStep, a,
                                          b.panel(panel) + k_begin * width + (column - begin) * kStep, width * kStep,
                                          to(), c_stride, fresh);
    column = end, ++panel;
  }
}

// FarC: C is not in L1, and is asked for where it is loaded as a whole (tiles.h).
template <class Target, bool Accumulate, bool FarC = false>
FA_INLINE void multiply_strip(const StripA<typename Target::Elem>& a, const Panels<Target>& b, index_t k_begin,
                              index_t k_end, index_t first, index_t last, typename Target::Real* c, index_t c_stride,
                              bool fresh = false) {
  NobodyWatches nobody;
  Range watched{first, last};
  multiply_watched<Target, Accumulate>(a, b, k_begin, k_end, first, last, c, c_stride, watched, nobody, fresh);
}

}  // namespace flash_attn::cpu
