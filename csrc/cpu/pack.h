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
  // `rows` rows of n features, row_bytes apart, as multiplicands at out[row * stride], zero-padded to `stride`. From
  // there on `run` rows lie one after another, of which some are asked for.
  void (*load)(const char* source, index_t row_bytes, index_t run, index_t rows, index_t n, Elem* out, index_t stride);
  void (*store)(const Real* row, Real factor, index_t n, void* out);  // row * factor, rounded to nearest even
  // The same for rows of x, `stride` apart, to rows of memory.
  using StoreRows = void (*)(const Real* x, index_t stride, const Real* factors, index_t rows, index_t n, char* out,
                             index_t row_bytes);
  StoreRows store_rows;   // Through the caches; the memory is asked for.
  StoreRows stream_rows;  // Past the caches, rows of whole lines; null where there are no such stores.
  // out[r] = sum of x * y over row r, for rows of n features.
  void (*dot_rows)(const char* x, index_t x_bytes, const char* y, index_t y_bytes, index_t rows, index_t n, Real* out);
  index_t size;  // bytes of one element
  bool as_is;    // the tensor's elements are multiplicands
};

template <class Target, class T>
struct RowsOf {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  static constexpr int W = Simd::W, kParts = Target::kParts;

  static void load_real(const void* source, index_t n, Real* out) {
    const T* in = static_cast<const T*>(source);
    index_t i = 0;
    for (; i + W <= n; i += W) Simd::store(out + i, Simd::load(in + i));
    if (i < n) Simd::store_first(out + i, Simd::load_first(in + i, n - i), n - i);
  }
  // The parts of a number are `part` elements apart. A call of memcpy takes longer than to move a row of a usual
  // length.
  static FA_INLINE void load_row(const void* source, index_t n, Elem* out, [[maybe_unused]] index_t part) {
    if constexpr (kParts > 1) {
      const T* in = static_cast<const T*>(source);
      for (index_t i = 0; i < n; i += W)
        Target::Format::store_parts(out + i, part, Simd::load_first(in + i, n - i), n - i);
    } else if constexpr (std::is_same_v<Elem, T>) {
      constexpr index_t kPart = 64 / sizeof(T);
      const T* in = static_cast<const T*>(source);
      index_t i = 0;
      for (; i + kPart <= n; i += kPart) std::memcpy(out + i, in + i, 64);
      if (i < n) std::memcpy(out + i, in + i, static_cast<std::size_t>(n - i) * sizeof(T));
    } else if constexpr (std::is_same_v<Elem, Real>) {
      load_real(source, n, out);
    }
  }
  static void load(const char* source, index_t row_bytes, index_t run, index_t rows, index_t n, Elem* out,
                   index_t stride) {
    const index_t bytes = n * static_cast<index_t>(sizeof(T));
    const index_t ahead = rows_in_l1(row_bytes);
    for (index_t r = 0; r < rows; ++r, source += row_bytes, out += stride) {
      prefetch_rows_ahead(source, row_bytes, bytes, run - r, ahead);
      load_row(source, n, out, stride / kParts);
      for (index_t part = 0; part < kParts; ++part)
        for (index_t i = n; i < stride / kParts; ++i) out[part * (stride / kParts) + i] = {};
    }
  }
  // Multiplicands as products get them: of bf16, what is subnormal becomes 0.
  using Stored = std::conditional_t<std::is_same_v<Elem, T>, typename Target::Format, Simd>;
  static FA_INLINE void store(const Real* row, Real factor, index_t n, void* out) {
    T* to = static_cast<T*>(out);
    using V = typename Simd::V;
    index_t i = 0;
    for (; i + W <= n; i += W) Stored::store(to + i, Simd::load(row + i) * V(factor));
    if (i < n) Stored::store_first(to + i, Simd::load_first(row + i, n - i) * V(factor), n - i);
  }
  static void store_rows(const Real* x, index_t stride, const Real* factors, index_t rows, index_t n, char* out,
                         index_t row_bytes) {
    const index_t bytes = n * static_cast<index_t>(sizeof(T)), ahead = rows_in_l1(row_bytes);
    for (index_t r = 0; r < rows; ++r, x += stride, out += row_bytes) {
      prefetch_row(out + ahead * row_bytes, bytes);
      store(x, factors[r], n, out);
    }
  }
  static void stream_rows(const Real* x, index_t stride, const Real* factors, index_t rows, index_t n, char* out,
                          index_t row_bytes) {
    for (index_t r = 0; r < rows; ++r, x += stride, out += row_bytes)
      for (index_t i = 0; i < n; i += W)
        Stored::stream(reinterpret_cast<T*>(out) + i, Simd::load(x + i) * typename Simd::V(factors[r]));
    Simd::end_streams();
  }
  static void dot_rows(const char* x, index_t x_bytes, const char* y, index_t y_bytes, index_t rows, index_t n,
                       Real* out) {
    const index_t bytes = n * static_cast<index_t>(sizeof(T)), ahead = rows_in_l1(y_bytes);
    for (index_t r = 0; r < rows; ++r, x += x_bytes, y += y_bytes) {
      prefetch_rows_ahead(y, y_bytes, bytes, rows - r, ahead);
      out[r] = dot(x, y, n);
    }
  }
  static FA_INLINE Real dot(const void* left, const void* right, index_t n) {
    const T *const x = static_cast<const T*>(left), *const y = static_cast<const T*>(right);
    typename Simd::V sums(Real(0));
    index_t i = 0;
    for (; i + W <= n; i += W) sums = fma(Simd::load(x + i), Simd::load(y + i), sums);
    if (i < n) sums = fma(Simd::load_first(x + i, n - i), Simd::load_first(y + i, n - i), sums);
    return Simd::reduce_sum(sums);
  }
  static constexpr RowFormat<Target> format() {
    typename RowFormat<Target>::StoreRows streams = nullptr;
    if constexpr (requires(T* to, typename Simd::V x) { Simd::stream(to, x); }) streams = stream_rows;
    return {load, store, store_rows, streams, dot_rows, sizeof(T), std::is_same_v<Elem, T>};
  }
};

template <class Target>
RowFormat<Target> row_format(DType dtype) {
  if constexpr (std::is_same_v<typename Target::Real, double>) {
    return RowsOf<Target, double>::format();
  } else if constexpr (Target::kParts > 1) {
    return RowsOf<Target, std::conditional_t<Target::kParts == 2, Half, float>>::format();
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

// `rows` rows of `features` as multiplicands at out[row * stride], zero-padded to `stride` features and `padded_rows`
// rows. `run` as above.
template <class Target>
void load_rows_of_run(const RowFormat<Target>& format, const char* source, index_t row_bytes, index_t run, index_t rows,
                      index_t padded_rows, index_t features, index_t stride, typename Target::Elem* out) {
  format.load(source, row_bytes, run, rows, features, out, stride);
  for (index_t i = rows * stride; i < padded_rows * stride; ++i) out[i] = {};
}
template <class Target>
void load_rows(const RowFormat<Target>& format, const char* source, index_t row_bytes, index_t rows,
               index_t padded_rows, index_t features, index_t stride, typename Target::Elem* out) {
  load_rows_of_run(format, source, row_bytes, rows, rows, padded_rows, features, stride, out);
}

// Asks for rows of the page that begins with key `key` of a sequence, if there is one.
template <class Target>
void ask_for_keys(const RowFormat<Target>& format, const Problem& p, const Operand& x, const Sequence& sequence,
                  index_t b, index_t hk, index_t key, index_t features) {
  if (key >= sequence.k_len) return;
  const KeyRun run = p.keys_from(sequence, b, key);
  const index_t row_bytes = x.row_stride * format.size, left = min_of(run.count, sequence.k_len - key);
  const char* const row = row_at(x, format.size, run.batch, run.row, hk);
  for (index_t n = 0; n < min_of(left, rows_in_l1(row_bytes)); ++n)
    prefetch_row(row + n * row_bytes, features * format.size);
}

// Keys first .. first + keys - 1 of sequence b (x is its keys or its values), wherever they are stored.
template <class Target>
void load_keys(const RowFormat<Target>& format, const Problem& p, const Operand& x, index_t b, index_t hk,
               index_t first, index_t keys, index_t padded_rows, index_t features, index_t stride,
               typename Target::Elem* out) {
  p.each_run(p.sequence(b), b, {first, first + keys}, [&](const KeyRun& run, index_t at) {
    const index_t n = at - first, padded = n + run.count == keys ? padded_rows - n : run.count;
    load_rows(format, row_at(x, format.size, run.batch, run.row, hk), x.row_stride * format.size, run.count, padded,
              features, stride, out + n * stride);
  });
}

// Rows as multiplicands, `stride` elements apart, to be packed. Rows that lie `ahead` of those in work are asked for,
// unless it is 0, as far as `run` rows lie one after another.
template <class Target>
struct RowsToPack {
  const typename Target::Elem* data;
  index_t stride;
  index_t ahead = 0, run = 0;

  // Where row r is next, and `count` rows with it, `bytes` of each.
  FA_INLINE void ask(index_t r, index_t count, index_t bytes) const {
    if (ahead == 0) return;
    for (index_t n = r + ahead; n < min_of(r + ahead + count, run); ++n) prefetch_row(data + n * stride, bytes);
  }
};

// Columns [0, width) of one panel, from rows: k-steps [0, steps) become rows of the panel.
template <class Target>
void pack_transposed_panel(const RowsToPack<Target>& rows, index_t steps, index_t width, typename Target::Elem* out) {
  using Format = typename Target::Format;
  constexpr index_t kStep = Format::kStep, W = Target::Simd::W;
  for (index_t c = 0; c < width; c += W) {
    const index_t stride = rows.stride;
    const auto* const from = rows.data + c * stride;
    auto* const to = out + c * kStep;
    rows.ask(c, W, steps * kStep * static_cast<index_t>(sizeof(*from)));
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

// B = rows^T: columns are the rows (padded to b.columns, a multiple of W), k runs over features (b.depth <= stride) and
// their parts.
template <class Target>
void pack_transposed(const typename Target::Elem* rows, index_t stride, const Panels<Target>& b) {
  for (index_t panel = 0; panel < b.count(); ++panel)
    pack_transposed_panel<Target>({rows + b.begin(panel) * stride, stride}, b.depth / b.kStep, b.width(panel),
                                  b.panel(panel));
}

// k-steps [k_begin, k_end) of B = rows, from rows that begin at k_begin: k runs over rows, columns are features.
template <class Target>
void pack_direct_rows(const RowsToPack<Target>& rows, index_t k_begin, index_t k_end, const Panels<Target>& b) {
  const auto* from = rows.data;
  for (index_t at = k_begin; at < b.depth; at += b.depth / Target::kParts, from += rows.stride / Target::kParts)
    for (index_t panel = 0; panel < b.count(); ++panel) {
      auto* out = b.panel(panel) + at * b.width(panel);
      for (index_t k = 0; k < k_end - k_begin; k += b.kStep) {
        if (panel == 0) rows.ask(k, b.kStep, b.columns * static_cast<index_t>(sizeof(*from)));
        for (index_t c = 0; c < b.width(panel); c += b.W, out += b.W * b.kStep)
          Target::Format::gather_step(from + k * rows.stride + b.begin(panel) + c, rows.stride, out);
      }
    }
}

// Whether rows of x are as products take them, `stride` features of each.
template <class Target>
bool is_as_packed(const RowFormat<Target>& format, const Operand& x, index_t features, index_t stride) {
  return format.as_is && features == stride && x.row_stride % Target::Format::kStep == 0;
}

// `padded` rows of x from `source` on, of which `rows` exist: where they are, if they are as products take them, else
// in `staging`. From there on `run` rows lie one after another in memory, of which `ask` has some asked for.
template <class Target>
RowsToPack<Target> rows_to_pack(const RowFormat<Target>& format, const Operand& x, const char* source, index_t run,
                                index_t rows, index_t padded, index_t features, index_t stride, bool ask,
                                typename Target::Elem* staging) {
  if (rows == padded && is_as_packed(format, x, features, stride)) {
    const index_t ahead = rows_in_l1(x.row_stride * format.size);
    return {reinterpret_cast<const typename Target::Elem*>(source), x.row_stride, ask ? ahead : 0, run};
  }
  load_rows_of_run(format, source, x.row_stride * format.size, ask ? run : 0, rows, padded, features, stride, staging);
  return {staging, stride};
}

template <class Target>
void pack_direct(const typename Target::Elem* rows, index_t stride, const Panels<Target>& b) {
  pack_direct_rows<Target>({rows, stride}, 0, b.depth / Target::kParts, b);
}

}  // namespace flash_attn::cpu
