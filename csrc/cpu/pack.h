// From rows of q, k, v, dout in memory to what the micro-kernel reads.
#pragma once

#include <cstring>
#include <type_traits>

#include "core/problem.h"
#include "cpu/gemm.h"
#include "cpu/rows_ahead.h"

namespace flash_attn::cpu {

// Row conversions between a tensor's dtype and the kernels' types, chosen once per call.
template <class Target>
struct RowFormat {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  void (*load)(const void* source, index_t n, Elem* out);             // to multiplicands
  void (*store)(const Real* row, Real factor, index_t n, void* out);  // row * factor, rounded to nearest even
  Real (*dot)(const void* x, const void* y, index_t n);               // sum of x * y
  index_t size;                                                       // bytes of one element
  bool as_is;                                                         // the tensor's elements are multiplicands
};

template <class Target, class T>
struct RowsOf {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  static constexpr int W = Simd::W;

  static void load_real(const void* source, index_t n, Real* out) {
    const T* in = static_cast<const T*>(source);
    index_t i = 0;
    for (; i + W <= n; i += W) Simd::store(out + i, Simd::load(in + i));
    for (; i < n; ++i) out[i] = to_float(in[i]);
  }
  static void load(const void* source, index_t n, Elem* out) {
    if constexpr (std::is_same_v<Elem, T>)
      std::memcpy(out, source, static_cast<std::size_t>(n) * sizeof(T));
    else if constexpr (std::is_same_v<Elem, Real>)
      load_real(source, n, out);
  }
  static void store(const Real* row, Real factor, index_t n, void* out) {
    T* to = static_cast<T*>(out);
    using V = typename Simd::V;
    index_t i = 0;
    for (; i + W <= n; i += W) Simd::store(to + i, Simd::load(row + i) * V(factor));
    for (; i < n; ++i) {
      if constexpr (std::is_same_v<T, Real>)
        to[i] = row[i] * factor;
      else
        to[i] = from_float<T>(row[i] * factor);
    }
  }
  static Real dot(const void* left, const void* right, index_t n) {
    const T *const x = static_cast<const T*>(left), *const y = static_cast<const T*>(right);
    typename Simd::V sums(Real(0));
    index_t i = 0;
    for (; i + W <= n; i += W) sums = fma(Simd::load(x + i), Simd::load(y + i), sums);
    Real sum = Simd::reduce_sum(sums);
    for (; i < n; ++i) sum += Real(to_float(x[i])) * Real(to_float(y[i]));
    return sum;
  }
  static constexpr RowFormat<Target> format() { return {load, store, dot, sizeof(T), std::is_same_v<Elem, T>}; }
};

template <class Target>
RowFormat<Target> row_format(DType dtype) {
  if constexpr (std::is_same_v<typename Target::Real, double>) {
    return RowsOf<Target, double>::format();
  } else if constexpr (std::is_same_v<typename Target::Elem, BFloat16>) {
    return RowsOf<Target, BFloat16>::format();
  } else {
    if (dtype == DType::f16) return RowsOf<Target, Half>::format();
    if (dtype == DType::bf16) return RowsOf<Target, BFloat16>::format();
    return RowsOf<Target, float>::format();
  }
}

// Pointer to element (b, row, h, 0) of an operand whose elements have `size` bytes.
FA_INLINE char* row_at(const Operand& x, index_t size, index_t b, index_t row, index_t h) {
  return static_cast<char*>(x.data) + (b * x.batch_stride + row * x.row_stride + h * x.head_stride) * size;
}

// A call of memcpy, or of a function pointer, takes longer than to move a row of a usual length.
FA_INLINE void copy_row(const char* from, index_t bytes, char* to) {
  constexpr index_t kPart = 64;
  index_t byte = 0;
  for (; byte + kPart <= bytes; byte += kPart) std::memcpy(to + byte, from + byte, kPart);
  if (byte < bytes) std::memcpy(to + byte, from + byte, static_cast<std::size_t>(bytes - byte));
}

// `rows` rows of `features` as multiplicands at out[row * stride], zero-padded to `stride` features and `padded_rows`
// rows.
template <class Target>
void load_rows(const RowFormat<Target>& format, const char* source, index_t row_bytes, index_t rows,
               index_t padded_rows, index_t features, index_t stride, typename Target::Elem* out) {
  for (index_t r = 0; r < rows; ++r, source += row_bytes, out += stride) {
    if (rows > kPrefetchRows) prefetch_rows_ahead(source, row_bytes, features * format.size, rows);
    if (format.as_is)
      copy_row(source, features * format.size, reinterpret_cast<char*>(out));
    else
      format.load(source, features, out);
    for (index_t d = features; d < stride; ++d) out[d] = {};
  }
  for (index_t i = 0; i < (padded_rows - rows) * stride; ++i) out[i] = {};
}

// Keys first .. first + keys - 1 of sequence b (x is its keys or its values), wherever they are stored.
template <class Target>
void load_keys(const RowFormat<Target>& format, const Problem& p, const Operand& x, index_t b, index_t hk,
               index_t first, index_t keys, index_t padded_rows, index_t features, index_t stride,
               typename Target::Elem* out) {
  const Sequence sequence = p.sequence(b);
  for (index_t n = 0; n < keys;) {
    const KeyRun run = p.keys_from(sequence, b, first + n);
    const index_t rows = min_of(run.count, keys - n);
    const index_t padded = n + rows == keys ? padded_rows - n : rows;
    load_rows(format, row_at(x, format.size, run.batch, run.row, hk), x.row_stride * format.size, rows, padded,
              features, stride, out + n * stride);
    n += rows;
  }
}

// Columns [0, width) of one panel, from rows: k-steps [0, steps) become rows of the panel.
template <class Target>
void pack_transposed_panel(const typename Target::Elem* rows, index_t stride, index_t steps, index_t width,
                           typename Target::Elem* out) {
  using Format = typename Target::Format;
  constexpr index_t kStep = Format::kStep, W = Target::Simd::W;
  for (index_t c = 0; c < width; c += W) {
    const auto* const from = rows + c * stride;
    auto* const to = out + c * kStep;
    // The last block overlaps the one before it, so that nothing past the last k-step is touched.
    for (index_t step = 0; step < steps && steps >= W; step += W) {
      const index_t at = min_of(step, steps - W);
      Format::transpose(from + at * kStep, stride, to + at * width * kStep, width * kStep);
    }
    for (index_t step = 0; step < steps && steps < W; ++step)
      for (index_t n = 0; n < W; ++n)
        std::memcpy(to + (step * width + n) * kStep, from + n * stride + step * kStep, sizeof(*to) * kStep);
  }
}

// B = rows^T: columns are the rows (padded to b.columns, a multiple of W), k runs over features (b.depth <= stride).
template <class Target>
void pack_transposed(const typename Target::Elem* rows, index_t stride, const Panels<Target>& b) {
  for (index_t panel = 0; panel < b.count(); ++panel)
    pack_transposed_panel<Target>(rows + b.begin(panel) * stride, stride, b.depth / b.kStep, b.width(panel),
                                  b.panel(panel));
}

// k-steps [k_begin, k_end) of B = rows, from rows that begin at k_begin: k runs over rows, columns are features
// (stride == b.columns).
template <class Target>
void pack_direct_rows(const typename Target::Elem* rows, index_t stride, index_t k_begin, index_t k_end,
                      const Panels<Target>& b) {
  for (index_t panel = 0; panel < b.count(); ++panel) {
    auto* out = b.panel(panel) + k_begin * b.width(panel);
    for (index_t k = 0; k < k_end - k_begin; k += b.kStep)
      for (index_t c = 0; c < b.width(panel); c += b.W, out += b.W * b.kStep)
        Target::Format::gather_step(rows + k * stride + b.begin(panel) + c, stride, out);
  }
}

template <class Target>
void pack_direct(const typename Target::Elem* rows, index_t stride, const Panels<Target>& b) {
  pack_direct_rows<Target>(rows, stride, 0, b.depth, b);
}

}  // namespace flash_attn::cpu
