// AVX2 + FMA + F16C: 8 fp32 lanes. Include only in files compiled for that instruction set.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <limits>

#include "core/numeric.h"
#include "cpu/simd/vector_math.h"

namespace flash_attn::cpu {

struct Avx2Vector {
  __m256 v;
  Avx2Vector() = default;
  FA_INLINE explicit Avx2Vector(__m256 x) : v(x) {}
  FA_INLINE explicit Avx2Vector(float x) : v(_mm256_set1_ps(x)) {}
};

FA_INLINE Avx2Vector operator+(Avx2Vector a, Avx2Vector b) { return Avx2Vector(_mm256_add_ps(a.v, b.v)); }
FA_INLINE Avx2Vector operator-(Avx2Vector a, Avx2Vector b) { return Avx2Vector(_mm256_sub_ps(a.v, b.v)); }
FA_INLINE Avx2Vector operator*(Avx2Vector a, Avx2Vector b) { return Avx2Vector(_mm256_mul_ps(a.v, b.v)); }
FA_INLINE Avx2Vector operator/(Avx2Vector a, Avx2Vector b) { return Avx2Vector(_mm256_div_ps(a.v, b.v)); }
FA_INLINE Avx2Vector vmax(Avx2Vector a, Avx2Vector b) { return Avx2Vector(_mm256_max_ps(a.v, b.v)); }
FA_INLINE Avx2Vector vmin(Avx2Vector a, Avx2Vector b) { return Avx2Vector(_mm256_min_ps(a.v, b.v)); }
FA_INLINE Avx2Vector vabs(Avx2Vector a) { return Avx2Vector(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)); }
FA_INLINE Avx2Vector fma(Avx2Vector a, Avx2Vector b, Avx2Vector c) {
  return Avx2Vector(_mm256_fmadd_ps(a.v, b.v, c.v));
}
FA_INLINE Avx2Vector select_less(Avx2Vector a, Avx2Vector b, Avx2Vector then, Avx2Vector otherwise) {
  return Avx2Vector(_mm256_blendv_ps(otherwise.v, then.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)));
}
template <int Steps>
FA_INLINE Avx2Vector exp2_steps(Avx2Vector t) {
  static_assert(Steps == 8);
  const __m256i n = _mm256_castps_si256(t.v);
  const __m256 table = _mm256_setr_ps(1.0f, 0.982753873f, 0.969603539f, 0.960919797f, 0.957106769f, 0.958605409f,
                                      0.965896428f, 0.979504049f);
  const __m256i fraction = _mm256_castps_si256(_mm256_permutevar8x32_ps(table, n));
  return Avx2Vector(_mm256_castsi256_ps(_mm256_add_epi32(fraction, _mm256_slli_epi32(n, 20))));
}
FA_INLINE Avx2Vector zero_below(Avx2Vector y, Avx2Vector x, float bound) {
  return Avx2Vector(_mm256_and_ps(y.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(bound), _CMP_NLT_UQ)));
}
FA_INLINE Avx2Vector softmax_weight(Avx2Vector x) { return weight_by_table<8>(x); }
FA_INLINE Avx2Vector softmax_weight_beside_products(Avx2Vector x) { return weight_by_table<8>(x); }
FA_INLINE Avx2Vector vtanh(Avx2Vector x) { return tanh_rational(x); }

// 4 numbers of 32 bits, each in a lane of 64.
struct Avx2Wide {
  static constexpr int kLanes = 4;
  __m256i v;
  FA_INLINE explicit Avx2Wide(__m256i x) : v(x) {}
  FA_INLINE explicit Avx2Wide(std::uint32_t x) : v(_mm256_set1_epi64x(static_cast<long long>(x))) {}
  static FA_INLINE Avx2Wide every_second(std::uint32_t first) {
    return Avx2Wide(_mm256_add_epi32(Avx2Wide(first).v, _mm256_setr_epi64x(0, 2, 4, 6)));
  }
};
FA_INLINE Avx2Wide multiply_low(Avx2Wide a, Avx2Wide b) { return Avx2Wide(_mm256_mul_epu32(a.v, b.v)); }
FA_INLINE Avx2Wide high_half(Avx2Wide a) { return Avx2Wide(_mm256_srli_epi64(a.v, 32)); }
FA_INLINE Avx2Wide exclusive_or(Avx2Wide a, Avx2Wide b, Avx2Wide c) {
  return Avx2Wide(_mm256_xor_si256(_mm256_xor_si256(a.v, b.v), c.v));
}

struct Avx2Simd {
  using Real = float;
  using V = Avx2Vector;
  using Wide = Avx2Wide;
  static constexpr int W = 8;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  static FA_INLINE V load(const float* p) { return V(_mm256_loadu_ps(p)); }
  template <class T>
  static FA_INLINE V load(const T* p) {
    return widen(p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static FA_INLINE void store(float* p, V x) { _mm256_storeu_ps(p, x.v); }
  static FA_INLINE void store(Half* p, V x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
  }
  static FA_INLINE void store(BFloat16* p, V x) {
    const __m256i bits = _mm256_castps_si256(x.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // The first n elements of W, if there are fewer: zeros in the other lanes, and nothing else of memory is touched.
  static FA_INLINE V load_first(const float* p, index_t n) { return V(_mm256_maskload_ps(p, first(n))); }
  // Halves of words, for which there are no masks: in pairs, and one by itself. Never through memory, which would have
  // GCC 12 keep the accumulators of loops around it there too.
  template <class T>
  static FA_INLINE V load_first(const T* p, index_t n) {
    return n >= W ? load(p) : widen(p, first_halves(p, n));
  }
  // 2 W elements, two to a word, which split into the even and the odd ones.
  static FA_INLINE __m256i load_pairs(const BFloat16* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static FA_INLINE __m256i load_pairs(const BFloat16* p, index_t n) {
    if (n >= 2 * W) return load_pairs(p);
    if (n <= W) return _mm256_zextsi128_si256(first_halves(p, n));
    return _mm256_set_m128i(first_halves(p + W, n - W), first_halves(p, W));
  }
  static FA_INLINE void split_pairs(__m256i pairs, V* of_bf16) {
    of_bf16[0] = V(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
    of_bf16[1] = V(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)))));
  }
  // What has been split is in order again.
  static FA_INLINE void interleave(V* x) {
    const __m256 low = _mm256_unpacklo_ps(x[0].v, x[1].v), high = _mm256_unpackhi_ps(x[0].v, x[1].v);
    x[0] = V(_mm256_permute2f128_ps(low, high, 0x20));
    x[1] = V(_mm256_permute2f128_ps(low, high, 0x31));
  }
  static FA_INLINE void store_first(float* p, V x, index_t n) { _mm256_maskstore_ps(p, first(n), x.v); }
  template <class T>
  static FA_INLINE void store_first(T* p, V x, index_t n) {
    if (n >= W) return store(p, x);
    alignas(16) T part[W];
    store(part, x);
    if (n % 2 == 0)
      _mm_maskstore_epi32(reinterpret_cast<int*>(p), pairs(n), _mm_load_si128(reinterpret_cast<const __m128i*>(part)));
    else
      std::memcpy(p, part, static_cast<std::size_t>(n) * sizeof(T));
  }
  static FA_INLINE V from_products(V x) { return x; }
  // GCC 12 would have each product of x load it again, which takes a Zen 1 longer than the product.
  static FA_INLINE V in_register(V x) {
#if !defined(_MSC_VER)
    __asm__("" : "+x"(x.v));
#endif
    return x;
  }
  // Lanes 1, 0, 3, 2, ...
  static FA_INLINE V swap_neighbours(V x) { return V(_mm256_permute_ps(x.v, 0xB1)); }
  static FA_INLINE V iota() { return V(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)); }
  static FA_INLINE float reduce_max(V x) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static FA_INLINE float reduce_sum(V x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  // Lane i is the sum of the lanes of x[i]. A blend and a shuffle or two for each pair of vectors, where a horizontal
  // addition has two shuffles inside.
  static FA_INLINE V sum_each(const V* x) {
    const __m256 low = sum_pairs(sum_halves(x[0].v, x[2].v), sum_halves(x[1].v, x[3].v));
    const __m256 high = sum_pairs(sum_halves(x[4].v, x[6].v), sum_halves(x[5].v, x[7].v));
    return V(_mm256_add_ps(_mm256_blend_ps(low, high, 0xF0), _mm256_permute2f128_ps(low, high, 0x21)));
  }
  // 8 rows of 8 words, strides in words; as for AVX-512, row 4 L + i in lane L of vector i.
  static FA_INLINE void transpose(const float* in, index_t in_stride, float* out, index_t out_stride) {
    for (int c = 0; c < W; c += 4) {
      __m256 r[4];
      for (int i = 0; i < 4; ++i) {
        const float* const row = in + i * in_stride + c;
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * in_stride), 1);
      }
      const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1]));
      const __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3]));
      const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
      const __m256d e = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
      float* const to = out + c * out_stride;
      _mm256_storeu_ps(to, _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)));
      _mm256_storeu_ps(to + out_stride, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
      _mm256_storeu_ps(to + 2 * out_stride, _mm256_castpd_ps(_mm256_unpacklo_pd(d, e)));
      _mm256_storeu_ps(to + 3 * out_stride, _mm256_castpd_ps(_mm256_unpackhi_pd(d, e)));
    }
  }
  static FA_INLINE V hide_where_zero(V x, const std::uint8_t* bytes) {
    const __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    const __m256 hidden = _mm256_castsi256_ps(_mm256_cmpeq_epi32(words, _mm256_setzero_si256()));
    return V(_mm256_blendv_ps(x.v, _mm256_set1_ps(-kInfinity), hidden));
  }
  static FA_INLINE V keep_where(V x, const std::uint8_t* bits, index_t n) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits[n / 8]), lane), lane);
    return V(_mm256_and_ps(_mm256_castsi256_ps(kept), x.v));
  }
  static FA_INLINE std::uint64_t bytes_at_most(Wide even, Wide odd, std::uint32_t threshold) {
    return at_most(words(even, odd), threshold);
  }
  static FA_INLINE std::uint64_t bytes_at_most_by_byte(Wide even, Wide odd, std::uint32_t threshold) {
    const __m256i in_lane =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i bytes = _mm256_shuffle_epi8(words(even, odd), in_lane);
    return at_most(_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), threshold);
  }

 private:
  // The first n elements of W, zeros behind them.
  template <class T>
  static FA_INLINE __m128i first_halves(const T* p, index_t n) {
    if (n >= W) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i lane =
        _mm_cmpeq_epi16(_mm_set1_epi16(static_cast<short>(n - 1)), _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7));
    const __m128i last =
        n % 2 == 0 ? _mm_setzero_si128() : _mm_and_si128(lane, _mm_set1_epi16(static_cast<short>(p[n - 1].bits)));
    return _mm_or_si128(_mm_maskload_epi32(reinterpret_cast<const int*>(p), pairs(n / 2 * 2)), last);
  }
  // Of each 128 bits: a0 + a2, a1 + a3, b0 + b2, b1 + b3.
  static FA_INLINE __m256 sum_halves(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xCC), _mm256_shuffle_ps(a, b, 0x4E));
  }
  // Of each 128 bits: a0 + a1, b0 + b1, a2 + a3, b2 + b3.
  static FA_INLINE __m256 sum_pairs(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xAA), _mm256_permute_ps(_mm256_blend_ps(b, a, 0xAA), 0xB1));
  }
  static FA_INLINE __m256i words(Wide even, Wide odd) {
    return _mm256_blend_epi32(even.v, _mm256_slli_epi64(odd.v, 32), 0xAA);
  }
  static FA_INLINE std::uint64_t at_most(__m256i bytes, std::uint32_t threshold) {
    const __m256i smaller = _mm256_min_epu8(bytes, _mm256_set1_epi8(static_cast<char>(threshold)));
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(smaller, bytes)));
  }
  static FA_INLINE __m256i first(index_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n < W ? n : W)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static FA_INLINE V widen(const Half*, __m128i bits) { return V(_mm256_cvtph_ps(bits)); }
  static FA_INLINE V widen(const BFloat16*, __m128i bits) {
    return V(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  }
  static FA_INLINE __m128i pairs(index_t n) {
    return _mm_cmpgt_epi32(_mm_set1_epi32(static_cast<int>(n)), _mm_setr_epi32(0, 2, 4, 6));
  }
};

}  // namespace flash_attn::cpu
