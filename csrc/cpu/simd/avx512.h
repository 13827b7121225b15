// AVX-512 (F, BW, DQ, VL): 16 fp32 lanes. Include only in files compiled for that instruction set.
#pragma once

#include <immintrin.h>

#include <cstring>
#include <limits>

#include "core/numeric.h"
#include "cpu/simd/vector_math.h"

namespace flash_attn::cpu {

struct Avx512Vector {
  __m512 v;
  Avx512Vector() = default;
  FA_INLINE explicit Avx512Vector(__m512 x) : v(x) {}
  FA_INLINE explicit Avx512Vector(float x) : v(_mm512_set1_ps(x)) {}
};

FA_INLINE Avx512Vector operator+(Avx512Vector a, Avx512Vector b) { return Avx512Vector(_mm512_add_ps(a.v, b.v)); }
FA_INLINE Avx512Vector operator-(Avx512Vector a, Avx512Vector b) { return Avx512Vector(_mm512_sub_ps(a.v, b.v)); }
FA_INLINE Avx512Vector operator*(Avx512Vector a, Avx512Vector b) { return Avx512Vector(_mm512_mul_ps(a.v, b.v)); }
FA_INLINE Avx512Vector operator/(Avx512Vector a, Avx512Vector b) { return Avx512Vector(_mm512_div_ps(a.v, b.v)); }
FA_INLINE Avx512Vector vmax(Avx512Vector a, Avx512Vector b) { return Avx512Vector(_mm512_max_ps(a.v, b.v)); }
FA_INLINE Avx512Vector vmin(Avx512Vector a, Avx512Vector b) { return Avx512Vector(_mm512_min_ps(a.v, b.v)); }
FA_INLINE Avx512Vector vabs(Avx512Vector a) { return Avx512Vector(_mm512_abs_ps(a.v)); }
FA_INLINE Avx512Vector fma(Avx512Vector a, Avx512Vector b, Avx512Vector c) {
  return Avx512Vector(_mm512_fmadd_ps(a.v, b.v, c.v));
}
FA_INLINE Avx512Vector select_less(Avx512Vector a, Avx512Vector b, Avx512Vector then, Avx512Vector otherwise) {
  return Avx512Vector(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), otherwise.v, then.v));
}
template <int Steps>
FA_INLINE Avx512Vector exp2_steps(Avx512Vector t) {
  static_assert(Steps == 32);
  const __m512 low = _mm512_setr_ps(1.0f, 0.995323598f, 0.990886867f, 0.98669523f, 0.982753873f, 0.979068398f,
                                    0.97564429f, 0.97248745f, 0.969603539f, 0.966998696f, 0.964678884f, 0.962650478f,
                                    0.960919797f, 0.959493339f, 0.958377779f, 0.95757997f);
  const __m512 high = _mm512_setr_ps(0.957106769f, 0.956965387f, 0.957163095f, 0.957707226f, 0.958605409f, 0.959865451f,
                                     0.961495161f, 0.963502765f, 0.965896428f, 0.968684673f, 0.971876085f, 0.975479543f,
                                     0.979504049f, 0.98395884f, 0.988853276f, 0.994197071f);
  const __m512i n = _mm512_castps_si512(t.v);
  const __m512i entry = _mm512_castps_si512(_mm512_permutex2var_ps(low, n, high));
  return Avx512Vector(_mm512_castsi512_ps(_mm512_add_epi32(entry, _mm512_slli_epi32(n, 18))));
}
// 2^x where no instruction of it has to share its pipeline with products, in two factors: what this returns and, by
// vscalefps, the power of 2 below 2^x. Rounded down to a step, so that both mean the same integer.
FA_INLINE __m512 exp2_mantissa(Avx512Vector x) {
  const __m512 low = _mm512_setr_ps(1.0f, 1.0218972f, 1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f, 1.13878858f,
                                    1.1637249f, 1.18920708f, 1.21524739f, 1.24185777f, 1.26905096f, 1.29683959f,
                                    1.32523668f, 1.35425556f, 1.38390994f);
  const __m512 high = _mm512_setr_ps(1.41421354f, 1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f,
                                     1.61049032f, 1.64575553f, 1.68179286f, 1.71861935f, 1.75625217f, 1.79470909f,
                                     1.8340081f, 1.87416768f, 1.91520655f, 1.95714414f);
  constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const __m512 t = _mm512_add_round_ps(x.v, _mm512_set1_ps(kExp2Shift<32>), kDown);
  const __m512 f = _mm512_reduce_ps(x.v, 5 << 4 | _MM_FROUND_TO_NEG_INF);
  const __m512 step = _mm512_permutex2var_ps(low, _mm512_castps_si512(t), high);
  // (2^f - 1) / f on [0, 1/32]: relative error of 2^f 6.6e-8.
  const __m512 slope = _mm512_fmadd_ps(_mm512_set1_ps(0.2426527f), f, _mm512_set1_ps(0.69312376f));
  return _mm512_fmadd_ps(_mm512_mul_ps(step, f), slope, step);
}
// 0 and infinity for infinities.
FA_INLINE Avx512Vector vexp2(Avx512Vector x) { return Avx512Vector(_mm512_scalef_ps(exp2_mantissa(x), x.v)); }
// No number on the way is subnormal.
FA_INLINE Avx512Vector softmax_weight(Avx512Vector x) {
  const __mmask16 shows = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(kLeastWeight), _CMP_NLT_UQ);
  return Avx512Vector(_mm512_maskz_scalef_ps(shows, exp2_mantissa(x), x.v));
}
// While one exists, results that would be subnormal are 0 on its thread.
class FlushSubnormals {
 public:
  FA_INLINE FlushSubnormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  FA_INLINE ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};
// Softmax weights there, where nothing has to be compared: 0 below 2^-126.
FA_INLINE Avx512Vector softmax_weight_flushed(Avx512Vector x) { return vexp2(x); }
template <int Stage>
FA_INLINE void weigh_beside_products(WeightInWork<Avx512Vector>& w) {
  weigh_by_adders<32, Stage>(w);
}
FA_INLINE Avx512Vector softmax_weight_beside_products(Avx512Vector x) { return weight_by_adders<32>(x); }
FA_INLINE Avx512Vector vtanh(Avx512Vector x) { return tanh_rational(x); }

// Division for processors with AMX, whose instruction takes 8 to 16 cycles (docs/cpu-amx.md): an estimate of 14 bits
// and a step of Newton's, within 2 ulp, of numbers that are not subnormal.
struct ByEstimate {
  FA_INLINE Avx512Vector operator()(Avx512Vector n, Avx512Vector d) const {
    const __m512 r = _mm512_rcp14_ps(d.v), quotient = _mm512_mul_ps(n.v, r);
    return Avx512Vector(_mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, d.v, n.v), r, quotient));
  }
  // 1 / d, which may be infinite, is 0 to all who add it to 1; NaN stays.
  static FA_INLINE Avx512Vector finite(Avx512Vector d) { return vmin(Avx512Vector(1.2676506e30f), d); }
};

// 8 numbers of 32 bits, each in a lane of 64.
struct Avx512Wide {
  static constexpr int kLanes = 8;
  __m512i v;
  FA_INLINE explicit Avx512Wide(__m512i x) : v(x) {}
  FA_INLINE explicit Avx512Wide(std::uint32_t x) : v(_mm512_set1_epi64(static_cast<long long>(x))) {}
  static FA_INLINE Avx512Wide every_second(std::uint32_t first) {
    return Avx512Wide(_mm512_add_epi32(Avx512Wide(first).v, _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14)));
  }
  static FA_INLINE Avx512Wide load(const std::uint64_t* p) { return Avx512Wide(_mm512_loadu_si512(p)); }
};
FA_INLINE Avx512Wide multiply_low(Avx512Wide a, Avx512Wide b) { return Avx512Wide(_mm512_mul_epu32(a.v, b.v)); }
FA_INLINE Avx512Wide high_half(Avx512Wide a) { return Avx512Wide(_mm512_srli_epi64(a.v, 32)); }
FA_INLINE Avx512Wide exclusive_or(Avx512Wide a, Avx512Wide b, Avx512Wide c) {
  return Avx512Wide(_mm512_ternarylogic_epi64(a.v, b.v, c.v, 0x96));
}

struct Avx512Simd {
  using Real = float;
  using V = Avx512Vector;
  using Wide = Avx512Wide;
  static constexpr int W = 16;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  static FA_INLINE V load(const float* p) { return V(_mm512_loadu_ps(p)); }
  template <class T>
  static FA_INLINE V load(const T* p) {
    return widen(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static FA_INLINE void store(float* p, V x) { _mm512_storeu_ps(p, x.v); }
  template <class T>
  static FA_INLINE void store(T* p, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round(p, x));
  }
  // Past the caches, to an address that is a multiple of what is stored. Others see it after end_streams().
  static FA_INLINE void stream(float* p, V x) { _mm512_stream_ps(p, x.v); }
  template <class T>
  static FA_INLINE void stream(T* p, V x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), round(p, x));
  }
  static FA_INLINE void end_streams() { _mm_sfence(); }
  static FA_INLINE __mmask16 first(index_t n) {
    return n < W ? static_cast<__mmask16>((1u << n) - 1) : __mmask16(0xffff);
  }
  // The first n elements of W, if there are fewer: zeros in the other lanes, and nothing else of memory is touched.
  static FA_INLINE V load_first(const float* p, index_t n) { return V(_mm512_maskz_loadu_ps(first(n), p)); }
  template <class T>
  static FA_INLINE V load_first(const T* p, index_t n) {
    return widen(p, _mm256_maskz_loadu_epi16(first(n), p));
  }
  // 2 W elements, two to a word, which split into the even and the odd ones.
  static FA_INLINE __m512i load_pairs(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static FA_INLINE __m512i load_pairs(const BFloat16* p, index_t n) {
    return _mm512_maskz_loadu_epi16(n < 2 * W ? (__mmask32(1) << n) - 1 : ~__mmask32(0), p);
  }
  // 2 W elements, of which the first n are p's and the others zeros, to an address that is a multiple of 64 bytes.
  static FA_INLINE void copy_first(const BFloat16* p, index_t n, BFloat16* to) {
    _mm512_store_si512(to, load_pairs(p, n));
  }
  // W elements, each with a zero after it, and each with a zero before it.
  static FA_INLINE void store_beside_zeros(const BFloat16* p, BFloat16* before_zeros, BFloat16* after_zeros) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    _mm512_storeu_si512(before_zeros, low);
    _mm512_storeu_si512(after_zeros, _mm512_slli_epi32(low, 16));
  }
  static FA_INLINE void split_pairs(__m512i pairs, V* of_bf16) {
    of_bf16[0] = V(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    of_bf16[1] = V(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))));
  }
  // What has been split is in order again.
  static FA_INLINE void interleave(V* x) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const V first = V(_mm512_permutex2var_ps(x[0].v, low, x[1].v));
    x[1] = V(_mm512_permutex2var_ps(x[0].v, high, x[1].v));
    x[0] = first;
  }
  static FA_INLINE void store_first(float* p, V x, index_t n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
  template <class T>
  static FA_INLINE void store_first(T* p, V x, index_t n) {
    _mm256_mask_storeu_epi16(p, first(n), round(p, x));
  }
  // As it is (-0 becomes 0), but by an instruction of the adders. On a Zen 4 a store that reads a register takes the
  // pipelines of products a cycle or two, and none where an adder hands over what it has just computed. It stores every
  // other cycle, so results that leave the adders that fast come from a register after all: two instructions of the
  // adders a store, as with maxima, cost nothing (docs/cpu-zen4.md).
  static FA_INLINE V from_products(V x) { return x + V(0.0f); }
  static FA_INLINE V in_register(V x) { return x; }
  // *a * b + c, with *a in memory: each use loads it again, so that no broadcast into a register, which on a Zen 4
  // takes time of the pipelines, is between. GCC 12 makes it one unless it is told.
  static FA_INLINE V add_product(const float* a, V b, V c) {
#if defined(_MSC_VER)
    return fma(V(*a), b, c);
#else
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c.v) : "v"(b.v), "m"(*a));
    return c;
#endif
  }
  // Lanes 1, 0, 3, 2, ...
  static FA_INLINE V swap_neighbours(V x) { return V(_mm512_permute_ps(x.v, 0xB1)); }
  static FA_INLINE V iota() { return V(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)); }
  static FA_INLINE bool any_less(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) != 0; }
  static FA_INLINE float reduce_max(V x) { return _mm512_reduce_max_ps(x.v); }
  static FA_INLINE float reduce_sum(V x) { return _mm512_reduce_add_ps(x.v); }
  // Lane i is the sum of the lanes of x[i], or their maximum.
  static FA_INLINE V sum_each(const V* x) {
    return reduce_each(x, [](V a, V b) { return a + b; });
  }
  static FA_INLINE V max_each(const V* x) {
    return reduce_each(x, [](V a, V b) { return vmax(a, b); });
  }
  // 16 rows of 16 words, or as many of their columns, in fours; strides in words. Vectors are gathered so that row 4 L
  // + i lands in 128-bit lane L of vector i: then only a 4 x 4 transpose inside the lanes is left.
  static FA_INLINE void transpose(const float* in, index_t in_stride, float* out, index_t out_stride,
                                  index_t columns = W) {
    for (index_t c = 0; c < columns; c += 4) {
      __m512 r[4];
      for (int i = 0; i < 4; ++i) {
        const float* const row = in + i * in_stride + c;
        const __m256 low =
            _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * in_stride), 1);
        const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row + 8 * in_stride)),
                                                 _mm_loadu_ps(row + 12 * in_stride), 1);
        r[i] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
      }
      const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
      const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
      const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
      const __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
      float* const to = out + c * out_stride;
      _mm512_storeu_ps(to, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
      _mm512_storeu_ps(to + out_stride, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
      _mm512_storeu_ps(to + 2 * out_stride, _mm512_castpd_ps(_mm512_unpacklo_pd(d, e)));
      _mm512_storeu_ps(to + 3 * out_stride, _mm512_castpd_ps(_mm512_unpackhi_pd(d, e)));
    }
  }
  static FA_INLINE V hide_where_zero(V x, const std::uint8_t* bytes) {
    const __m128i mask = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    return V(_mm512_mask_blend_ps(_mm_test_epi8_mask(mask, mask), _mm512_set1_ps(-kInfinity), x.v));
  }
  static FA_INLINE V keep_where(V x, const std::uint8_t* bits, index_t n) {
    std::uint16_t kept;
    std::memcpy(&kept, bits + n / 8, sizeof(kept));
    return V(_mm512_maskz_mov_ps(kept, x.v));
  }
  static FA_INLINE std::uint64_t bytes_at_most(Wide even, Wide odd, std::uint32_t threshold) {
    return _mm512_cmple_epu8_mask(words(even, odd), _mm512_set1_epi8(static_cast<char>(threshold)));
  }
  static FA_INLINE std::uint64_t bytes_at_most_by_byte(Wide even, Wide odd, std::uint32_t threshold) {
    const __m512i in_lane = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(lanes, _mm512_shuffle_epi8(words(even, odd), in_lane));
    return _mm512_cmple_epu8_mask(bytes, _mm512_set1_epi8(static_cast<char>(threshold)));
  }

 private:
  // Lane i is what `join` makes of the lanes of x[i].
  template <class Join>
  static FA_INLINE V reduce_each(const V* x, const Join& join) {
    const auto lanes = [&](__m512 a, __m512 b) {
      return join(V(_mm512_unpacklo_ps(a, b)), V(_mm512_unpackhi_ps(a, b))).v;
    };
    const auto quarters = [&](V a, V b) {
      return join(V(_mm512_shuffle_f32x4(a.v, b.v, 0x88)), V(_mm512_shuffle_f32x4(a.v, b.v, 0xdd)));
    };
    // In each 128-bit lane those of that lane of x[first] .. x[first + 3]. No loop, so that x is in registers.
    const auto four = [&](int first) {
      const __m512d a = _mm512_castps_pd(lanes(x[first].v, x[first + 1].v));
      const __m512d b = _mm512_castps_pd(lanes(x[first + 2].v, x[first + 3].v));
      return join(V(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b))), V(_mm512_castpd_ps(_mm512_unpackhi_pd(a, b))));
    };
    return quarters(quarters(four(0), four(4)), quarters(four(8), four(12)));
  }
  static FA_INLINE __m512i words(Wide even, Wide odd) {
    return _mm512_mask_blend_epi32(0xAAAA, even.v, _mm512_slli_epi64(odd.v, 32));
  }
  static FA_INLINE V widen(const Half*, __m256i bits) { return V(_mm512_cvtph_ps(bits)); }
  static FA_INLINE V widen(const BFloat16*, __m256i bits) {
    return V(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
  static FA_INLINE __m256i round(const Half*, V x) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }
  static FA_INLINE __m256i round(const BFloat16*, V x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i out = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), rounded, quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16));
  }
};

}  // namespace flash_attn::cpu
