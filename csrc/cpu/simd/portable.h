// Vectors in plain C++: any CPU, and fp64. Loops over a fixed number of lanes, which compilers turn into what the
// target has.
#pragma once

#include <cmath>
#include <limits>

#include "core/numeric.h"
#include "cpu/simd/vector_math.h"

namespace flash_attn::cpu {

template <class R, int Lanes>
struct PortableVector {
  R lane[Lanes];

  PortableVector() = default;
  FA_INLINE explicit PortableVector(R x) {
    for (int i = 0; i < Lanes; ++i) lane[i] = x;
  }
};

#define FA_PORTABLE_LANES(expression)                         \
  PortableVector<R, Lanes> out;                               \
  for (int i = 0; i < Lanes; ++i) out.lane[i] = (expression); \
  return out
#define FA_PORTABLE             \
  template <class R, int Lanes> \
  FA_INLINE PortableVector<R, Lanes>

FA_PORTABLE operator+(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b) {
  FA_PORTABLE_LANES(a.lane[i] + b.lane[i]);
}
FA_PORTABLE operator-(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b) {
  FA_PORTABLE_LANES(a.lane[i] - b.lane[i]);
}
FA_PORTABLE operator*(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b) {
  FA_PORTABLE_LANES(a.lane[i] * b.lane[i]);
}
FA_PORTABLE operator/(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b) {
  FA_PORTABLE_LANES(a.lane[i] / b.lane[i]);
}
// vmax and vmin give b where one is NaN, as x86 does.
FA_PORTABLE vmax(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b) {
  FA_PORTABLE_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
FA_PORTABLE vmin(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b) {
  FA_PORTABLE_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]);
}
FA_PORTABLE vabs(PortableVector<R, Lanes> a) { FA_PORTABLE_LANES(a.lane[i] < 0 ? -a.lane[i] : a.lane[i]); }
// Two roundings where the target has no fused operation: a library call per lane would cost far more than it saves.
FA_PORTABLE fma(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b, PortableVector<R, Lanes> c) {
  FA_PORTABLE_LANES(a.lane[i] * b.lane[i] + c.lane[i]);
}
FA_PORTABLE select_less(PortableVector<R, Lanes> a, PortableVector<R, Lanes> b, PortableVector<R, Lanes> then,
                        PortableVector<R, Lanes> otherwise) {
  FA_PORTABLE_LANES(a.lane[i] < b.lane[i] ? then.lane[i] : otherwise.lane[i]);
}
// Adding and subtracting 1.5 * 2^23 rounds to an integer in the default rounding mode, for |x| < 2^22.
FA_PORTABLE round_to_int(PortableVector<R, Lanes> a) { FA_PORTABLE_LANES((a.lane[i] + R(12582912.0)) - R(12582912.0)); }
FA_PORTABLE scale_by_power(PortableVector<R, Lanes> y, PortableVector<R, Lanes> n) {
  // Two halves, each a normal power of two, so that results below 2^-126 underflow gradually and -150 gives 0.
  PortableVector<R, Lanes> out;
  for (int i = 0; i < Lanes; ++i) {
    const int whole = int(n.lane[i]), half = whole / 2;
    out.lane[i] = y.lane[i] * bit_cast<float>(std::uint32_t(half + 127) << 23) *
                  bit_cast<float>(std::uint32_t(whole - half + 127) << 23);
  }
  return out;
}

template <int Lanes>
FA_INLINE PortableVector<float, Lanes> softmax_weight(PortableVector<float, Lanes> x) {
  using V = PortableVector<float, Lanes>;
  return select_less(x, V(kLeastWeight), V(0.0f), exp2_polynomial(vmax(V(kLeastWeight), x)));
}
template <class R, int Lanes>
FA_INLINE PortableVector<R, Lanes> softmax_weight_beside_products(PortableVector<R, Lanes> x) {
  return softmax_weight(x);
}
template <int Lanes>
FA_INLINE PortableVector<float, Lanes> vtanh(PortableVector<float, Lanes> x) {
  return tanh_rational(x);
}
// fp64 is the precision that everything else is checked against: the C library's functions.
template <int Lanes>
FA_INLINE PortableVector<double, Lanes> softmax_weight(PortableVector<double, Lanes> x) {
  using R = double;
  FA_PORTABLE_LANES(::exp2(x.lane[i]));
}
template <int Lanes>
FA_INLINE PortableVector<double, Lanes> vtanh(PortableVector<double, Lanes> x) {
  using R = double;
  FA_PORTABLE_LANES(::tanh(x.lane[i]));
}
#undef FA_PORTABLE
#undef FA_PORTABLE_LANES

// 4 numbers of 32 bits, each in a lane of 64 whose upper half may hold anything. The tag keeps the copies of different
// instruction sets apart.
template <class Tag>
struct PortableWide {
  static constexpr int kLanes = 4;
  std::uint64_t lane[kLanes];

  PortableWide() = default;
  FA_INLINE explicit PortableWide(std::uint32_t x) {
    for (int i = 0; i < kLanes; ++i) lane[i] = x;
  }
  static FA_INLINE PortableWide every_second(std::uint32_t first) {
    PortableWide out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = first + std::uint32_t(2 * i);
    return out;
  }
};
template <class Tag>
FA_INLINE PortableWide<Tag> multiply_low(PortableWide<Tag> a, PortableWide<Tag> b) {
  for (int i = 0; i < a.kLanes; ++i) a.lane[i] = (a.lane[i] & 0xffffffffu) * (b.lane[i] & 0xffffffffu);
  return a;
}
template <class Tag>
FA_INLINE PortableWide<Tag> high_half(PortableWide<Tag> a) {
  for (int i = 0; i < a.kLanes; ++i) a.lane[i] >>= 32;
  return a;
}
template <class Tag>
FA_INLINE PortableWide<Tag> exclusive_or(PortableWide<Tag> a, PortableWide<Tag> b, PortableWide<Tag> c) {
  for (int i = 0; i < a.kLanes; ++i) a.lane[i] ^= b.lane[i] ^ c.lane[i];
  return a;
}

template <class R, int Lanes>
struct PortableSimd {
  using Real = R;
  using V = PortableVector<R, Lanes>;
  using Wide = PortableWide<V>;
  static constexpr int W = Lanes;

  template <class T>
  static FA_INLINE V load(const T* p) {
    V out;
    for (int i = 0; i < W; ++i) out.lane[i] = to_float(p[i]);
    return out;
  }
  static FA_INLINE void store(R* p, V x) {
    for (int i = 0; i < W; ++i) p[i] = x.lane[i];
  }
  template <class T>
  static FA_INLINE void store(T* p, V x) {
    for (int i = 0; i < W; ++i) p[i] = from_float<T>(x.lane[i]);
  }
  // The first n elements of W, if there are fewer: zeros in the other lanes, and nothing else of memory is touched.
  template <class T>
  static FA_INLINE V load_first(const T* p, index_t n) {
    if (n >= W) return load(p);
    V out(R(0));
    for (int i = 0; i < n; ++i) out.lane[i] = to_float(p[i]);
    return out;
  }
  template <class T>
  static FA_INLINE void store_first(T* p, V x, index_t n) {
    if (n >= W) return store(p, x);
    for (int i = 0; i < n; ++i)
      if constexpr (std::is_same_v<T, R>)
        p[i] = x.lane[i];
      else
        p[i] = from_float<T>(x.lane[i]);
  }
  // A result of products on its way to memory, as it is.
  static FA_INLINE V from_products(V x) { return x; }
  static FA_INLINE V in_register(V x) { return x; }
  // 0, 1, 2, ...
  static FA_INLINE V iota() {
    V out;
    for (int i = 0; i < W; ++i) out.lane[i] = R(i);
    return out;
  }
  static FA_INLINE R reduce_max(V x) {
    R out = x.lane[0];
    for (int i = 1; i < W; ++i) out = max_of(out, x.lane[i]);
    return out;
  }
  static FA_INLINE R reduce_sum(V x) {
    R out = x.lane[0];
    for (int i = 1; i < W; ++i) out += x.lane[i];
    return out;
  }
  // Lane i is the sum of the lanes of x[i].
  static FA_INLINE V sum_each(const V* x) {
    V out;
    for (int i = 0; i < W; ++i) out.lane[i] = reduce_sum(x[i]);
    return out;
  }
  // W rows of W elements.
  static FA_INLINE void transpose(const R* in, index_t in_stride, R* out, index_t out_stride) {
    for (int r = 0; r < W; ++r)
      for (int c = 0; c < W; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
  // x where the byte is not 0, else -inf.
  static FA_INLINE V hide_where_zero(V x, const std::uint8_t* bytes) {
    for (int i = 0; i < W; ++i) x.lane[i] = bytes[i] ? x.lane[i] : -std::numeric_limits<R>::infinity();
    return x;
  }
  // x where bit n + lane of `bits` is set, else 0; n is a multiple of W.
  static FA_INLINE V keep_where(V x, const std::uint8_t* bits, index_t n) {
    for (index_t i = 0; i < W; ++i) x.lane[i] = (bits[(n + i) / 8] >> ((n + i) % 8)) & 1 ? x.lane[i] : R(0);
    return x;
  }
  // Which bytes of the words even[0], odd[0], even[1], ... are at most `threshold`: bit 4 * word + byte, or words *
  // byte
  // + word.
  static FA_INLINE std::uint64_t bytes_at_most(Wide even, Wide odd, std::uint32_t threshold) {
    return at_most(even, odd, threshold, 4, 1);
  }
  static FA_INLINE std::uint64_t bytes_at_most_by_byte(Wide even, Wide odd, std::uint32_t threshold) {
    return at_most(even, odd, threshold, 1, 2 * Wide::kLanes);
  }

 private:
  static FA_INLINE std::uint64_t at_most(Wide even, Wide odd, std::uint32_t threshold, int per_word, int per_byte) {
    std::uint64_t out = 0;
    for (int word = 0; word < 2 * Wide::kLanes; ++word)
      for (int byte = 0; byte < 4; ++byte) {
        const std::uint64_t value = (word % 2 ? odd : even).lane[word / 2] >> (8 * byte) & 255;
        out |= std::uint64_t(value <= threshold) << (word * per_word + byte * per_byte);
      }
    return out;
  }
};

}  // namespace flash_attn::cpu
