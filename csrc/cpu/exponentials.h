// The softmax of several rows side by side: a row alone would wait for its own results.
#pragma once

#include "cpu/target.h"

namespace flash_attn::cpu {

// Rows whose softmax the registers hold.
template <class Target>
inline constexpr int kRowsAbreast = Target::kRows % 4 == 0 ? 4 : 2;

// exp2 over N rows of scores, stride apart. What is kept of a probability makes P, all of it makes the sum. As many
// vectors of a row at a time as fill one of P, row by row, so that it can run beside a product (gemm.h): in as many
// k-steps as it makes columns of P, a stage of a weight at a time.
template <class Target, int N, class Stride = index_t>
struct Exponentials {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Format = typename Target::Format;
  static constexpr int W = Simd::W;
  static constexpr int kVectors = Format::kStep;
  static constexpr int kParts = W * kPartsOfStep;

  const Real* x;
  Elem* probabilities;
  Stride stride;               // From row to row.
  index_t left;                // Vectors of a row that have not had their turn.
  const Real *factor, *shift;  // exp2 is of x * factor + shift; they stay in memory, registers are short there.
  V sum[N];
  WeightInWork<V> in_work;
  V done[kVectors];  // Of the row that is in work.

  // The same where the stride is known to the compiler.
  template <class Other>
  explicit Exponentials(const Exponentials<Target, N, Other>& e)
      : x(e.x), probabilities(e.probabilities), stride{}, left(e.left), factor(e.factor), shift(e.shift) {
    for (int t = 0; t < N; ++t) sum[t] = e.sum[t];
  }
  Exponentials(const Real* scores, Elem* p, index_t vectors, index_t row_stride, const Real* factors,
               const Real* shifts)
      : x(scores), probabilities(p), stride(row_stride), left(vectors), factor(factors), shift(shifts) {
    for (V& of_row : sum) of_row = V(Real(0));
  }

  template <int Part>
  FA_INLINE void operator()(std::integral_constant<int, Part>) {
    constexpr int kOfRow = kParts / N, kOfVector = kOfRow / kVectors, kOfStage = kOfVector / kWeightStages;
    constexpr int kRow = Part / kOfRow, kVector = Part % kOfRow / kOfVector, kStage = Part % kOfVector / kOfStage;
    static_assert(kOfStage * kWeightStages * kVectors * N == kParts);
    if constexpr (Part % kOfStage == 0) {
      if (kStage == 0) in_work.x = exponent<kRow>(kVector * W);
      weigh_beside_products<kStage>(in_work);
      if (kStage == kWeightStages - 1) put<kRow>(in_work.x, kVector);
    }
  }
  FA_INLINE bool more() const { return left >= kVectors; }

  // So many vectors of each row, one more where what is left would not be whole turns.
  FA_INLINE void walk(index_t vectors) {
    const index_t then = max_of<index_t>(left - vectors, 0) / kVectors * kVectors;
    for (; (left - then) % kVectors > 0; go_on(1)) each_row([&](auto row) { take<row>([](V p) { return p; }); });
    while (left > then)
      each_row([&](auto row) {
        for (int n = 0; n < kVectors; ++n) put<row>(weight<row>(n * W), n);
      });
  }
  // All that is left. With dropout: bit `column` of a row says whether its next probability is kept.
  FA_INLINE void walk(const std::uint8_t* kept, index_t kept_stride, index_t column) {
    for (; left > 0; column += W, go_on(1))
      each_row(
          [&](auto row) { take<row>([&](V p) { return Simd::keep_where(p, kept + row * kept_stride, column); }); });
  }

 private:
  template <class Work>
  static FA_INLINE void each_row(Work&& work) {
    each_part(work, std::make_integer_sequence<int, N>());
  }
  FA_INLINE void go_on(index_t vectors) { x += vectors * W, probabilities += vectors * W, left -= vectors; }
  template <int Row>
  FA_INLINE V exponent(index_t column) const {
    return fma(Simd::load(x + Row * stride + column), V(factor[Row]), V(shift[Row]));
  }
  template <int Row>
  FA_INLINE V weight(index_t column) const {
    return softmax_weight_beside_products(exponent<Row>(column));
  }
  // The weights of the next vectors of a row, one by one; the last row goes on to the next columns.
  template <int Row>
  FA_INLINE void put(V p, int vector) {
    sum[Row] = sum[Row] + p;
    done[vector] = p;
    if (vector < kVectors - 1) return;
    Format::store_all(probabilities + Row * stride, 0, done);
    if (Row == N - 1) go_on(kVectors);
  }
  template <int Row, class Keep>
  FA_INLINE void take(const Keep& keep) {
    const V p = weight<Row>(0);
    sum[Row] = sum[Row] + p;
    Format::store(probabilities + Row * stride, keep(p));
  }
};

}  // namespace flash_attn::cpu
