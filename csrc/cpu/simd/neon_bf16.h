// Pairs of bf16 as AArch64 multiplies them (FEAT_BF16): BFDOT adds the products of two pairs to each fp32 lane,
// rounding to odd on the way (Arm Architecture Reference Manual, BFDOT and FPRoundingMode).
#pragma once

#include <cstring>

#include "cpu/simd/neon.h"

namespace flash_attn::cpu {

struct NeonBf16Pairs {
  using Elem = BFloat16;
  using Real = float;
  using V = NeonVector;
  using Simd = NeonSimd;
  static constexpr int kStep = 2, kStepsPerSum = 256, kParts = 1;

  // The lower half alone has the pair: BFDOT takes one lane for all.
  static FA_INLINE bfloat16x4_t broadcast(const Elem* a) {
    float pair;
    std::memcpy(&pair, a, sizeof(pair));
    return vreinterpret_bf16_f32(vset_lane_f32(pair, vdup_n_f32(0.0f), 0));
  }
  static FA_INLINE bfloat16x8_t load(const Elem* b) { return vreinterpretq_bf16_u16(vld1q_u16(Simd::words_of(b))); }
  static FA_INLINE bfloat16x8_t load_first(const Elem* b, index_t n) {
    if (n >= 2 * Simd::W) return load(b);
    const uint16x4_t low = Simd::first_words(b, n), none = vdup_n_u16(0);
    return vreinterpretq_bf16_u16(vcombine_u16(low, n > Simd::W ? Simd::first_words(b + Simd::W, n - Simd::W) : none));
  }
  static FA_INLINE V multiply_add(bfloat16x4_t a, bfloat16x8_t b, V c) { return V(vbfdotq_lane_f32(c.v, b, a, 0)); }
  static FA_INLINE V multiply_add(bfloat16x8_t a, bfloat16x8_t b, V c) { return V(vbfdotq_f32(c.v, a, b)); }
  static FA_INLINE uint16x4_t round(V x) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x.v)); }
  static FA_INLINE uint16x8_t round(V x, V y) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.v), y.v));
  }
  static FA_INLINE void store(Elem* p, V x) { vst1_u16(Simd::words_of(p), round(x)); }
  static FA_INLINE void store_first(Elem* p, V x, index_t n) { Simd::store_first_words(p, round(x), n); }
  // One after the other.
  static FA_INLINE void store_all(Elem* p, index_t, const V (&x)[kStep]) {
    vst1q_u16(Simd::words_of(p), round(x[0], x[1]));
  }
  static FA_INLINE void store_rows(Elem* p, index_t stride, V x, V y) { store(p, x), store(p + stride, y); }
  static FA_INLINE V weight(V x) { return softmax_weight(x); }
  static FA_INLINE V tanh_of_product(V x, V factor) { return vtanh(x * factor); }
  // Lane by lane the pair (x[0], x[1]): two rows of a matrix as one k-step of its transpose.
  static FA_INLINE void store_step(Elem* p, const V* x) {
    const uint16x8_t both = round(x[0], x[1]);
    vst1q_u16(Simd::words_of(p), vzip1q_u16(both, vextq_u16(both, both, Simd::W)));
  }
  // A pair is one word; NeonSimd::transpose moves words and never reads their value.
  static FA_INLINE void transpose(const Elem* in, index_t in_stride, Elem* out, index_t out_stride) {
    Simd::transpose(reinterpret_cast<const float*>(in), in_stride / 2, reinterpret_cast<float*>(out), out_stride / 2);
  }
  static FA_INLINE void gather_step(const Elem* in, index_t stride, Elem* out) {
    const uint16x4_t even = vld1_u16(Simd::words_of(in)), odd = vld1_u16(Simd::words_of(in + stride));
    vst1q_u16(Simd::words_of(out), vzip1q_u16(vcombine_u16(even, even), vcombine_u16(odd, odd)));
  }
};

}  // namespace flash_attn::cpu
