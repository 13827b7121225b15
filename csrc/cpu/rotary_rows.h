// Rotation of one row, included once per instruction set, by the rotary_*.cpp files. They are compiled without fused
// multiply-adds, so that all of them give the same bits.
#pragma once

#include "cpu/rotary.h"
#include "cpu/simd/portable.h"

namespace flash_attn::cpu {

template <class T>
FA_INLINE T rounded(float x) {
  return from_float<T>(x);
}
template <class T>
FA_INLINE T rounded(double x) {
  return x;
}

// cos and sin of some pairs of a row.
template <class Simd>
struct Angles {
  using Real = typename Simd::Real;
  static constexpr index_t kMost = 64;
  Real cos[kMost], sin[kMost];

  // Entries [first, first + n) of the row at `position`.
  FA_INLINE void load(const Rotary& r, index_t position, index_t first, index_t n) {
    convert(r.cos, position * r.cos.stride + first, n, cos);
    convert(r.sin, position * r.sin.stride + first, n, sin);
    for (index_t i = 0; r.conjugate && i < n; ++i) sin[i] = -sin[i];
  }

 private:
  static FA_INLINE void convert(const RotaryTable& table, index_t begin, index_t n, Real* to) {
    switch (table.dtype) {
      case DType::f16: return convert_from(static_cast<const Half*>(table.data) + begin, n, to);
      case DType::bf16: return convert_from(static_cast<const BFloat16*>(table.data) + begin, n, to);
      case DType::f64: return convert_from(static_cast<const double*>(table.data) + begin, n, to);
      default: return convert_from(static_cast<const float*>(table.data) + begin, n, to);
    }
  }
  template <class Entry>
  static FA_INLINE void convert_from(const Entry* from, index_t n, Real* to) {
    constexpr index_t W = Simd::W;
    index_t i = 0;
    if constexpr (!std::is_same_v<Simd, PortableSimd<Real, Simd::W>> && !std::is_same_v<Entry, double>)
      for (; i + W <= n; i += W) Simd::store(to + i, Simd::load(from + i));
    for (; i < n; ++i) to[i] = Real(to_float(from[i]));
  }
};

// Turns n pairs of one head. out may be x: whatever is stored was loaded before. This one by instructions of the set.
template <class Simd, class T>
struct Turns {
  using Real = typename Simd::Real;
  static constexpr index_t W = Simd::W;

  // Pair i is x[i] and x[i + distance].
  static FA_INLINE void halves(const Angles<Simd>& angles, const T* x, T* out, index_t distance, index_t n) {
    for (index_t i = 0; i < n; i += W) {
      const auto a = load(x + i, n - i), b = load(x + i + distance, n - i);
      const auto c = load(angles.cos + i, n - i), s = load(angles.sin + i, n - i);
      store(out + i, a * c - b * s, n - i);
      store(out + i + distance, a * s + b * c, n - i);
    }
  }
  // Pair i is x[2 * i] and x[2 * i + 1].
  static FA_INLINE void neighbours(const Angles<Simd>& angles, const T* x, T* out, index_t n) {
    Real cos[2 * Angles<Simd>::kMost], sin[2 * Angles<Simd>::kMost];
    for (index_t i = 0; i < n; ++i) {
      cos[2 * i] = cos[2 * i + 1] = angles.cos[i];
      sin[2 * i] = -angles.sin[i], sin[2 * i + 1] = angles.sin[i];
    }
    for (index_t i = 0; i < 2 * n; i += W) {
      const auto v = load(x + i, 2 * n - i), c = load(cos + i, 2 * n - i), s = load(sin + i, 2 * n - i);
      store(out + i, v * c + Simd::swap_neighbours(v) * s, 2 * n - i);
    }
  }

 private:
  template <class Of>
  static FA_INLINE typename Simd::V load(const Of* x, index_t n) {
    return n >= W ? Simd::load(x) : Simd::load_first(x, n);
  }
  static FA_INLINE void store(T* out, typename Simd::V x, index_t n) {
    n >= W ? Simd::store(out, x) : Simd::store_first(out, x, n);
  }
};

// And this one in loops over arrays, which compilers vectorise, conversions too.
template <class Real, int Lanes, class T>
struct Turns<PortableSimd<Real, Lanes>, T> {
  using Simd = PortableSimd<Real, Lanes>;
  static constexpr index_t kMost = Angles<Simd>::kMost;

  static void halves(const Angles<Simd>& angles, const T* x, T* out, index_t distance, index_t n) {
    turn<1>(angles, x, out, distance, n);
  }
  static void neighbours(const Angles<Simd>& angles, const T* x, T* out, index_t n) { turn<2>(angles, x, out, 1, n); }

 private:
  template <index_t step>
  static FA_INLINE void turn(const Angles<Simd>& angles, const T* x, T* out, index_t distance, index_t n) {
    Real a[kMost], b[kMost];
    for (index_t i = 0; i < n; ++i) a[i] = to_float(x[i * step]), b[i] = to_float(x[i * step + distance]);
    for (index_t i = 0; i < n; ++i) {
      const Real turned = a[i] * angles.cos[i] - b[i] * angles.sin[i];
      b[i] = a[i] * angles.sin[i] + b[i] * angles.cos[i];
      a[i] = turned;
    }
    for (index_t i = 0; i < n; ++i) out[i * step] = rounded<T>(a[i]), out[i * step + distance] = rounded<T>(b[i]);
  }
};

template <class Simd, class T>
void rotate_row(const Rotary& r, index_t position, Heads<const T> x, Heads<T> out, index_t heads, index_t features) {
  const index_t half = position >= 0 && position < r.positions ? r.half : 0;
  Angles<Simd> angles;
  for (index_t first = 0; first < half; first += angles.kMost) {
    const index_t n = min_of(angles.kMost, half - first);
    angles.load(r, position, first, n);
    for (index_t h = 0; h < heads; ++h) {
      const T* const from = x.data + h * x.stride;
      T* const to = out.data + h * out.stride;
      if (r.interleaved)
        Turns<Simd, T>::neighbours(angles, from + 2 * first, to + 2 * first, n);
      else
        Turns<Simd, T>::halves(angles, from + first, to + first, half, n);
    }
  }
  for (index_t h = 0; x.data != out.data && h < heads; ++h)
    for (index_t d = 2 * half; d < features; ++d) out.data[h * out.stride + d] = x.data[h * x.stride + d];
}

// f64 is the reference precision: portable code in double precision on every machine.
template <class Simd>
constexpr Rotations rotations_of(RotateRow<double> f64) {
  return {rotate_row<Simd, Half>, rotate_row<Simd, BFloat16>, rotate_row<Simd, float>, f64};
}

}  // namespace flash_attn::cpu
