// Rotary position embedding of one row, for every caller: apply_rotary and the cache. flash_attn/rotary.h says what it
// is.
#pragma once

#include "core/integers.h"
#include "core/numeric.h"
#include "core/problem.h"
#include "flash_attn/rotary.h"

namespace flash_attn {

struct RotaryProblem {
  DType dtype = DType::f32;
  Device device = Device::cpu;
  index_t B = 0, rows = 0, H = 0, D = 0;  // rows: S of each sequence; packed: B is 1 and these are all T.
  Operand x, out;
  Rotary rotary;
  index_t offset = 0;
  Integers offsets, cu_seqlens;  // Of sequences, packed or not.
};

/// Of dense or packed tensors; `rotary` is null where there is no rotation.
RotaryProblem validate(const RotaryArgs& args);
/// The tables of a tensor with D features; messages use these names.
Rotary resolve_rotary_tables(const char* cos_name, const TensorView& cos, const char* sin_name, const TensorView& sin,
                             index_t D);

template <class T>
FA_INLINE T rounded(float x) {
  return from_float<T>(x);
}
template <class T>
FA_INLINE T rounded(double x) {
  return x;
}

// Heads of one row: head h begins at data + h * stride.
template <class T>
struct Heads {
  T* data;
  index_t stride;
};

// Pairs of one head, turned a block at a time. In three loops, because out may be x and compilers vectorise these.
template <class T, class Real>
struct Pairs {
  static constexpr index_t kBlock = 64;
  Real cos[kBlock], sin[kBlock];

  // Entries [first, first + n) of the row at `position`.
  void load_angles(const Rotary& r, index_t position, index_t first, index_t n) {
    convert(r.cos, position, first, n, cos);
    convert(r.sin, position, first, n, sin);
    for (index_t i = 0; r.conjugate && i < n; ++i) sin[i] = -sin[i];
  }

  // Pair i is x[i * step] and x[i * step + distance].
  template <index_t step>
  void turn(const T* x, T* out, index_t distance, index_t n) const {
    Real a[kBlock], b[kBlock];
    for (index_t i = 0; i < n; ++i) a[i] = to_float(x[i * step]), b[i] = to_float(x[i * step + distance]);
    for (index_t i = 0; i < n; ++i) {
      const Real turned = a[i] * cos[i] - b[i] * sin[i];
      b[i] = a[i] * sin[i] + b[i] * cos[i];
      a[i] = turned;
    }
    for (index_t i = 0; i < n; ++i) out[i * step] = rounded<T>(a[i]), out[i * step + distance] = rounded<T>(b[i]);
  }

 private:
  template <class Entry>
  static void convert_from(const Entry* from, index_t n, Real* to) {
    for (index_t i = 0; i < n; ++i) to[i] = Real(to_float(from[i]));
  }
  static void convert(const RotaryTable& table, index_t position, index_t first, index_t n, Real* to) {
    const index_t begin = position * table.stride + first;
    switch (table.dtype) {
      case DType::f16: return convert_from(static_cast<const Half*>(table.data) + begin, n, to);
      case DType::bf16: return convert_from(static_cast<const BFloat16*>(table.data) + begin, n, to);
      case DType::f64: return convert_from(static_cast<const double*>(table.data) + begin, n, to);
      default: return convert_from(static_cast<const float*>(table.data) + begin, n, to);
    }
  }
};

/// The row at `position`; features that do not turn are copied, all of them where the tables have no such position.
/// out may be x.
template <class T>
void rotate(const Rotary& r, index_t position, Heads<const T> x, Heads<T> out, index_t heads, index_t features) {
  using Block = Pairs<T, decltype(to_float(T{}))>;
  const index_t half = position >= 0 && position < r.positions ? r.half : 0;
  Block pairs;
  for (index_t first = 0; first < half; first += Block::kBlock) {
    const index_t n = min_of(Block::kBlock, half - first);
    pairs.load_angles(r, position, first, n);
    for (index_t h = 0; h < heads; ++h) {
      const T* const from = x.data + h * x.stride;
      T* const to = out.data + h * out.stride;
      if (r.interleaved)
        pairs.template turn<2>(from + 2 * first, to + 2 * first, 1, n);
      else
        pairs.template turn<1>(from + first, to + first, half, n);
    }
  }
  for (index_t h = 0; x.data != out.data && h < heads; ++h)
    for (index_t d = 2 * half; d < features; ++d) out.data[h * out.stride + d] = x.data[h * x.stride + d];
}

}  // namespace flash_attn
