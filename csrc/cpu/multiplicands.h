// Multiplicand formats: what one k-step of the micro-kernel (gemm.h) multiplies.
#pragma once

#include <cstring>

#include "core/numeric.h"
#include "core/platform.h"
#include "cpu/simd/vector_math.h"

#if defined(__AVX512BF16__)
#include "cpu/simd/avx512.h"
#endif

namespace flash_attn::cpu {

// Products of fp32 and fp64 that are summed by themselves (gemm.h).
inline constexpr int kScalarsPerSum = 128;

// Multiplicands are the accumulator's own type: fp32 (to which fp16 and bf16 are converted while packing) or fp64.
template <class Simd>
struct Scalars {
  using Elem = typename Simd::Real;
  using Real = typename Simd::Real;
  using V = typename Simd::V;
  static constexpr int kStep = 1, kStepsPerSum = kScalarsPerSum, kParts = 1;

  static FA_INLINE V broadcast(const Elem* a) { return V(*a); }
  static FA_INLINE V load(const Elem* b) { return Simd::load(b); }
  static FA_INLINE V multiply_add(V a, V b, V c) { return fma(a, b, c); }
  static FA_INLINE void store(Elem* p, V x) { Simd::store(p, x); }
  static FA_INLINE void store_first(Elem* p, V x, index_t n) { Simd::store_first(p, x, n); }
  static FA_INLINE void stream(Elem* p, V x) { Simd::stream(p, x); }
  static FA_INLINE void store_all(Elem* p, index_t, const V (&x)[kStep]) { store(p, x[0]); }
  static FA_INLINE void store_rows(Elem* p, index_t stride, V x, V y) { store(p, x), store(p + stride, y); }
  static FA_INLINE void store_step(Elem* p, const V* x) { store(p, *x); }
  static FA_INLINE V weight(V x) { return softmax_weight(x); }
  static FA_INLINE V tanh_of_product(V x, V factor) { return vtanh(x * factor); }

  // W rows of W k-steps, for a B with the rows as columns; strides in elements.
  static FA_INLINE void transpose(const Elem* in, index_t in_stride, Elem* out, index_t out_stride) {
    Simd::transpose(in, in_stride, out, out_stride);
  }
  // W columns of one k-step, whose rows lie `stride` apart.
  static FA_INLINE void gather_step(const Elem* in, index_t, Elem* out) { Simd::store(out, Simd::load(in)); }
};

#if defined(__AVX512BF16__)
struct Bf16Pairs {
  using Elem = BFloat16;
  using Real = float;
  using V = Avx512Vector;
  // Of multiplicands that were rounded to 8 bits, a sum over 512 rounds nothing that would show.
  static constexpr int kStep = 2, kStepsPerSum = 256, kParts = 1;

  static FA_INLINE __m512i broadcast(const Elem* a) {
    std::int32_t pair;
    std::memcpy(&pair, a, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static FA_INLINE __m512i load(const Elem* b) { return _mm512_loadu_si512(b); }
  static FA_INLINE V multiply_add(__m512i a, __m512i b, V c) {
    return V(_mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
  static FA_INLINE __m256i round(V x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)); }
  static FA_INLINE __m512i round(V x, V y) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y.v, x.v)); }
  static FA_INLINE void store(Elem* p, V x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round(x)); }
  static FA_INLINE void store_first(Elem* p, V x, index_t n) {
    _mm256_mask_storeu_epi16(p, Avx512Simd::first(n), round(x));
  }
  static FA_INLINE void stream(Elem* p, V x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), round(x)); }
  // One after the other.
  static FA_INLINE void store_all(Elem* p, index_t, const V (&x)[kStep]) { _mm512_storeu_si512(p, round(x[0], x[1])); }
  static FA_INLINE void store_rows(Elem* p, index_t stride, V x, V y) {
    const __m512i both = round(x, y);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + stride), _mm512_extracti64x4_epi64(both, 1));
  }
  static FA_INLINE V weight(V x) { return softmax_weight(x); }
  // Not to the last place, which bf16 does not show; the LSE, which is fp32, stays within its tolerance.
  static FA_INLINE V tanh_of_product(V x, V factor) { return tanh_by_exp2(x, factor); }
  template <class Store>
  static FA_INLINE void each_part(V x, V y, const Store& store) {
    store(0, x, y);
  }
  // Lane by lane the pair (x, y): two rows of a matrix as k-steps of its transpose.
  static FA_INLINE void store_pairs(Elem* p, V x, V y) { _mm512_storeu_si512(p, in_pairs(round(x, y))); }
  // kStep rows of a matrix as one k-step of its transpose.
  static FA_INLINE void store_step(Elem* p, const V* x) { store_pairs(p, x[0], x[1]); }
  // A pair is one word; Avx512Simd::transpose moves words and never reads their value.
  static FA_INLINE void transpose(const Elem* in, index_t in_stride, Elem* out, index_t out_stride) {
    Avx512Simd::transpose(reinterpret_cast<const float*>(in), in_stride / 2, reinterpret_cast<float*>(out),
                          out_stride / 2);
  }
  static FA_INLINE void gather_step(const Elem* in, index_t stride, Elem* out) {
    const auto row = [](const Elem* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    _mm512_storeu_si512(out, in_pairs(_mm512_inserti64x4(_mm512_castsi256_si512(row(in)), row(in + stride), 1)));
  }

 private:
  // From 16 numbers x and then 16 numbers y: x[0], y[0], x[1], y[1], ...
  static FA_INLINE __m512i in_pairs(__m512i both) {
    alignas(64) static constexpr std::uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                             21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                             11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
  }
};

// bf16 for tiles.
struct Bf16OfTiles : Bf16Pairs {
  static FA_INLINE V weight(V x) { return softmax_weight_flushed(x); }
  static FA_INLINE V tanh_of_product(V x, V factor) { return tanh_by_exp2(x, factor, ByEstimate()); }
};

// Numbers as sums of so many bf16, the greatest first: two hold every fp16, three every fp32 that is not below 2^-110.
// A row has its first parts, then its second ones, ... An infinity has no such parts: its products are NaN.
template <int Parts>
struct Bf16Parts : Bf16OfTiles {
  static constexpr int kParts = Parts;

  // Parts of x at p[part * stride], rounded to nearest, so that neglected products of small ones (tiles.h) have either
  // sign.
  static FA_INLINE void store_parts(Elem* p, index_t stride, V x, index_t n) {
    for (int part = 0; part < Parts; ++part, p += stride) {
      const __m256i rounded = round(Parts > 2 && part == 0 ? within_bf16(x) : x);
      _mm256_mask_storeu_epi16(p, Avx512Simd::first(n), rounded);
      x = x - V(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
    }
  }
  static FA_INLINE void store_all(Elem* p, index_t stride, const V (&x)[kStep]) {
    each_part(x[0], x[1], [&](int part, V low, V high) { _mm512_storeu_si512(p + part * stride, round(low, high)); });
  }
  static FA_INLINE void store_rows(Elem* p, index_t stride, V x, V y) {
    each_part(x, y,
              [&](int part, V of_x, V of_y) { Bf16Pairs::store_rows(p + part * stride, Parts * stride, of_x, of_y); });
  }
  // store(part, x, y) for the parts of x and y, as numbers; all but the last part are cut off, which takes fewer
  // instructions than rounding.
  template <class Store>
  static FA_INLINE void each_part(V x, V y, const Store& store) {
    for (int part = 0; part < Parts - 1; ++part) {
      const V of_x = cut(x), of_y = cut(y);
      store(part, of_x, of_y);
      x = x - of_x, y = y - of_y;
    }
    store(Parts - 1, x, y);
  }
  static FA_INLINE V tanh_of_product(V x, V factor) { return tanh_rational(x * factor, ByEstimate()); }

 private:
  static FA_INLINE V cut(V x) {
    return V(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(~0xffff))));
  }
  // The greatest fp32 would be rounded to infinity.
  static FA_INLINE V within_bf16(V x) {
    const V most(3.3895314e38f);
    return vmax(V(0.0f) - most, vmin(most, x));  // NaN, the second operand, stays one.
  }
};
#endif

}  // namespace flash_attn::cpu
