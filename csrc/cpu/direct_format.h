// How rows of K and V become operands of products where they are in memory (direct_rows.h).
#pragma once

#include "cpu/target.h"

namespace flash_attn::cpu {

// How elements of type T in memory become multiplicands of a Format, `n` of them being left in the row.
template <class Target, class T>
struct ConvertedRows {
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Elem = typename Target::Elem;
  static constexpr int kLength = Simd::W;  // Features of a load.
  static constexpr int kVectors = 1;       // Accumulators that a load of one k-step of V meets.

  static FA_INLINE V load(const T* row) { return Simd::load(row); }
  static FA_INLINE V load(const T* row, index_t n) { return Simd::load_first(row, n); }
  static FA_INLINE V load_query(const Elem* q) { return Simd::in_register(Simd::load(q)); }
  static FA_INLINE V load_query(const Elem* q, index_t) { return load_query(q); }
  template <class... Left>
  static FA_INLINE void columns(const T* const* rows, index_t at, V* out, Left... left) {
    *out = load(rows[0] + at, left...);
  }
  static FA_INLINE void in_order(V*) {}
};
template <class Target, class T>
struct DirectFormat : ConvertedRows<Target, T> {};

// Columns of V by turns, even and odd ones: to take a half of each word is less work than to widen it.
template <class Target>
struct SplitPairs : ConvertedRows<Target, BFloat16> {
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  static constexpr int kVectors = 2;

  template <class... Left>
  static FA_INLINE void columns(const BFloat16* const* rows, index_t at, V* out, Left... left) {
    Simd::split_pairs(Simd::load_pairs(rows[0] + at, left...), out);
  }
  static FA_INLINE void in_order(V* sums) { Simd::interleave(sums); }
};
#if defined(__AVX2__) && defined(__FMA__)
template <int Rows, int PanelVectors>
struct DirectFormat<Target<Avx2Simd, Scalars<Avx2Simd>, Rows, PanelVectors>, BFloat16>
    : SplitPairs<Target<Avx2Simd, Scalars<Avx2Simd>, Rows, PanelVectors>> {};
#endif
#if defined(__AVX512F__)
template <int Rows, int PanelVectors>
struct DirectFormat<Target<Avx512Simd, Scalars<Avx512Simd>, Rows, PanelVectors>, BFloat16>
    : SplitPairs<Target<Avx512Simd, Scalars<Avx512Simd>, Rows, PanelVectors>> {};
#endif

#if defined(__AVX512BF16__)
// Pairs along the features for scores, pairs of keys for the output. The latter come out of the interleaving
// instructions four columns of each by turns: out[0] has columns 0-3, 8-11, 16-19 and 24-27, out[1] the others.
template <class SimdT, int Rows, int PanelVectors>
struct DirectFormat<Target<SimdT, Bf16Pairs, Rows, PanelVectors>, BFloat16> {
  using V = Avx512Vector;
  using Elem = BFloat16;
  static constexpr int kLength = 32, kVectors = 2;

  template <class... Left>
  static FA_INLINE __m512i load(const BFloat16* row, Left... left) {
    return Avx512Simd::load_pairs(row, left...);
  }
  static FA_INLINE __m512i load_query(const Elem* q) { return load(q); }
  static FA_INLINE __m512i load_query(const Elem* q, index_t n) { return load(q, n); }
  template <class... Left>
  static FA_INLINE void columns(const BFloat16* const* rows, index_t at, __m512i* out, Left... left) {
    const __m512i even = load(rows[0] + at, left...), odd = load(rows[1] + at, left...);
    out[0] = _mm512_unpacklo_epi16(even, odd);
    out[1] = _mm512_unpackhi_epi16(even, odd);
  }
  static FA_INLINE void in_order(V* sums) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const V first = V(_mm512_permutex2var_ps(sums[0].v, low, sums[1].v));
    sums[1] = V(_mm512_permutex2var_ps(sums[0].v, high, sums[1].v));
    sums[0] = first;
  }
};
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Likewise; the interleaving instructions leave columns in order.
template <int Rows, int PanelVectors>
struct DirectFormat<Target<NeonSimd, NeonBf16Pairs, Rows, PanelVectors>, BFloat16> {
  using V = NeonVector;
  using Elem = BFloat16;
  static constexpr int kLength = 8, kVectors = 2;

  static FA_INLINE bfloat16x8_t load(const BFloat16* row) { return NeonBf16Pairs::load(row); }
  static FA_INLINE bfloat16x8_t load(const BFloat16* row, index_t n) { return NeonBf16Pairs::load_first(row, n); }
  static FA_INLINE bfloat16x8_t load_query(const Elem* q) { return load(q); }
  static FA_INLINE bfloat16x8_t load_query(const Elem* q, index_t n) { return load(q, n); }
  template <class... Left>
  static FA_INLINE void columns(const BFloat16* const* rows, index_t at, bfloat16x8_t* out, Left... left) {
    const uint16x8_t even = vreinterpretq_u16_bf16(load(rows[0] + at, left...));
    const uint16x8_t odd = vreinterpretq_u16_bf16(load(rows[1] + at, left...));
    out[0] = vreinterpretq_bf16_u16(vzip1q_u16(even, odd));
    out[1] = vreinterpretq_bf16_u16(vzip2q_u16(even, odd));
  }
  static FA_INLINE void in_order(V*) {}
};
#endif

}  // namespace flash_attn::cpu
