// Advanced SIMD of AArch64, which all of its processors have: 4 fp32 lanes.
#pragma once

#include <arm_neon.h>

#include <cstring>
#include <limits>

#include "core/numeric.h"
#include "cpu/simd/vector_math.h"

namespace flash_attn::cpu {

struct NeonVector {
  float32x4_t v;
  NeonVector() = default;
  FA_INLINE explicit NeonVector(float32x4_t x) : v(x) {}
  FA_INLINE explicit NeonVector(float x) : v(vdupq_n_f32(x)) {}
};

FA_INLINE NeonVector operator+(NeonVector a, NeonVector b) { return NeonVector(vaddq_f32(a.v, b.v)); }
FA_INLINE NeonVector operator-(NeonVector a, NeonVector b) { return NeonVector(vsubq_f32(a.v, b.v)); }
FA_INLINE NeonVector operator*(NeonVector a, NeonVector b) { return NeonVector(vmulq_f32(a.v, b.v)); }
FA_INLINE NeonVector operator/(NeonVector a, NeonVector b) { return NeonVector(vdivq_f32(a.v, b.v)); }
// b where one is NaN, as x86 does; FMAX would give NaN.
FA_INLINE NeonVector vmax(NeonVector a, NeonVector b) { return NeonVector(vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)); }
FA_INLINE NeonVector vmin(NeonVector a, NeonVector b) { return NeonVector(vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)); }
FA_INLINE NeonVector vabs(NeonVector a) { return NeonVector(vabsq_f32(a.v)); }
FA_INLINE NeonVector fma(NeonVector a, NeonVector b, NeonVector c) { return NeonVector(vfmaq_f32(c.v, a.v, b.v)); }
FA_INLINE NeonVector select_less(NeonVector a, NeonVector b, NeonVector then, NeonVector otherwise) {
  return NeonVector(vbslq_f32(vcltq_f32(a.v, b.v), then.v, otherwise.v));
}
// A table look-up, which needs byte indices first, takes as many instructions as the longer polynomial without one.
template <int Steps>
FA_INLINE NeonVector exp2_steps(NeonVector t) {
  static_assert(Steps == 1);
  const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(t.v), 23);
  return NeonVector(vreinterpretq_f32_s32(vaddq_s32(exponent, vreinterpretq_s32_f32(vdupq_n_f32(1.0f)))));
}
FA_INLINE NeonVector zero_below(NeonVector y, NeonVector x, float bound) {
  return NeonVector(vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y.v), vcltq_f32(x.v, vdupq_n_f32(bound)))));
}
FA_INLINE NeonVector softmax_weight(NeonVector x) { return weight_by_table<1>(x); }
FA_INLINE NeonVector softmax_weight_beside_products(NeonVector x) { return weight_by_table<1>(x); }
FA_INLINE NeonVector vtanh(NeonVector x) { return tanh_rational(x); }

// 4 numbers of 32 bits, each in a lane of 64.
struct NeonWide {
  static constexpr int kLanes = 4;
  uint64x2_t low, high;
  FA_INLINE NeonWide(uint64x2_t first, uint64x2_t second) : low(first), high(second) {}
  FA_INLINE explicit NeonWide(std::uint32_t x) : low(vdupq_n_u64(x)), high(low) {}
  static FA_INLINE NeonWide every_second(std::uint32_t first) {
    const uint64x2_t steps = vcombine_u64(vcreate_u64(0), vcreate_u64(2));
    const uint64x2_t from = vaddq_u64(vdupq_n_u64(first), steps);
    return {from, vaddq_u64(from, vdupq_n_u64(4))};
  }
};
FA_INLINE uint64x2_t multiply_low(uint64x2_t a, uint64x2_t b) { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }
FA_INLINE NeonWide multiply_low(NeonWide a, NeonWide b) {
  return {multiply_low(a.low, b.low), multiply_low(a.high, b.high)};
}
FA_INLINE NeonWide high_half(NeonWide a) { return {vshrq_n_u64(a.low, 32), vshrq_n_u64(a.high, 32)}; }
FA_INLINE NeonWide exclusive_or(NeonWide a, NeonWide b, NeonWide c) {
  return {veorq_u64(veorq_u64(a.low, b.low), c.low), veorq_u64(veorq_u64(a.high, b.high), c.high)};
}

struct NeonSimd {
  using Real = float;
  using V = NeonVector;
  using Wide = NeonWide;
  static constexpr int W = 4;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  static FA_INLINE V load(const float* p) { return V(vld1q_f32(p)); }
  template <class T>
  static FA_INLINE V load(const T* p) {
    return widen(p, vld1_u16(words_of(p)));
  }
  static FA_INLINE void store(float* p, V x) { vst1q_f32(p, x.v); }
  template <class T>
  static FA_INLINE void store(T* p, V x) {
    vst1_u16(words_of(p), narrow(p, x));
  }
  // The first n elements of W, if there are fewer: zeros in the other lanes, and nothing else of memory is touched.
  static FA_INLINE V load_first(const float* p, index_t n) {
    if (n >= W) return load(p);
    const float32x4_t zero = vdupq_n_f32(0.0f);
    if (n <= 0) return V(zero);
    if (n == 1) return V(vld1q_lane_f32(p, zero, 0));
    const float32x4_t two = vcombine_f32(vld1_f32(p), vget_low_f32(zero));
    return V(n == 2 ? two : vld1q_lane_f32(p + 2, two, 2));
  }
  template <class T>
  static FA_INLINE V load_first(const T* p, index_t n) {
    return widen(p, first_words(p, n));
  }
  static FA_INLINE void store_first(float* p, V x, index_t n) {
    if (n >= W) return store(p, x);
    if (n >= 1) vst1q_lane_f32(p, x.v, 0);
    if (n >= 2) vst1q_lane_f32(p + 1, x.v, 1);
    if (n >= 3) vst1q_lane_f32(p + 2, x.v, 2);
  }
  template <class T>
  static FA_INLINE void store_first(T* p, V x, index_t n) {
    store_first_words(p, narrow(p, x), n);
  }
  // Elements of 16 bits, whatever they mean.
  template <class T>
  static FA_INLINE uint16x4_t first_words(const T* p, index_t n) {
    if (n >= W) return vld1_u16(words_of(p));
    uint16x4_t words = vdup_n_u16(0);
    if (n >= 1) words = vld1_lane_u16(words_of(p), words, 0);
    if (n >= 2) words = vld1_lane_u16(words_of(p) + 1, words, 1);
    if (n >= 3) words = vld1_lane_u16(words_of(p) + 2, words, 2);
    return words;
  }
  template <class T>
  static FA_INLINE void store_first_words(T* p, uint16x4_t words, index_t n) {
    if (n >= W) return vst1_u16(words_of(p), words);
    if (n >= 1) vst1_lane_u16(words_of(p), words, 0);
    if (n >= 2) vst1_lane_u16(words_of(p) + 1, words, 1);
    if (n >= 3) vst1_lane_u16(words_of(p) + 2, words, 2);
  }
  template <class T>
  static FA_INLINE const std::uint16_t* words_of(const T* p) {
    static_assert(sizeof(T) == sizeof(std::uint16_t));
    return reinterpret_cast<const std::uint16_t*>(p);
  }
  template <class T>
  static FA_INLINE std::uint16_t* words_of(T* p) {
    static_assert(sizeof(T) == sizeof(std::uint16_t));
    return reinterpret_cast<std::uint16_t*>(p);
  }
  static FA_INLINE V from_products(V x) { return x; }
  static FA_INLINE V in_register(V x) { return x; }
  // Lanes 1, 0, 3, 2.
  static FA_INLINE V swap_neighbours(V x) { return V(vrev64q_f32(x.v)); }
  static FA_INLINE V iota() {
    static constexpr float kLanes[W] = {0, 1, 2, 3};
    return load(kLanes);
  }
  static FA_INLINE float reduce_max(V x) { return vmaxvq_f32(x.v); }
  static FA_INLINE float reduce_sum(V x) { return vaddvq_f32(x.v); }
  // Lane i is the sum of the lanes of x[i].
  static FA_INLINE V sum_each(const V* x) {
    return V(vpaddq_f32(vpaddq_f32(x[0].v, x[1].v), vpaddq_f32(x[2].v, x[3].v)));
  }
  // 4 rows of 4 words, strides in words, whose values are never read.
  static FA_INLINE void transpose(const float* in, index_t in_stride, float* out, index_t out_stride) {
    float32x4_t row[W];
    for (int i = 0; i < W; ++i) row[i] = vld1q_f32(in + i * in_stride);
    const auto pairs = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
    const float64x2_t a = pairs(vtrn1q_f32(row[0], row[1])), b = pairs(vtrn1q_f32(row[2], row[3]));
    const float64x2_t c = pairs(vtrn2q_f32(row[0], row[1])), d = pairs(vtrn2q_f32(row[2], row[3]));
    vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(a, b)));
    vst1q_f32(out + out_stride, vreinterpretq_f32_f64(vtrn1q_f64(c, d)));
    vst1q_f32(out + 2 * out_stride, vreinterpretq_f32_f64(vtrn2q_f64(a, b)));
    vst1q_f32(out + 3 * out_stride, vreinterpretq_f32_f64(vtrn2q_f64(c, d)));
  }
  // x where the byte is not 0, else -inf.
  static FA_INLINE V hide_where_zero(V x, const std::uint8_t* bytes) {
    std::uint32_t four;
    std::memcpy(&four, bytes, sizeof(four));
    const uint32x4_t words = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    return V(vbslq_f32(vceqzq_u32(words), vdupq_n_f32(-kInfinity), x.v));
  }
  // x where bit n + lane of `bits` is set, else 0; n is a multiple of W.
  static FA_INLINE V keep_where(V x, const std::uint8_t* bits, index_t n) {
    static constexpr std::uint32_t kLanes[W] = {1, 2, 4, 8};
    const uint32x4_t kept = vtstq_u32(vdupq_n_u32(std::uint32_t(bits[n / 8]) >> (n % 8)), vld1q_u32(kLanes));
    return V(vreinterpretq_f32_u32(vandq_u32(kept, vreinterpretq_u32_f32(x.v))));
  }
  // Which bytes of the words even[0], odd[0], even[1], ... are at most `threshold`: bit 4 * word + byte, or words *
  // byte + word.
  static FA_INLINE std::uint64_t bytes_at_most(Wide even, Wide odd, std::uint32_t threshold) {
    return at_most(bytes_of_words(even.low, odd.low), bytes_of_words(even.high, odd.high), threshold);
  }
  static FA_INLINE std::uint64_t bytes_at_most_by_byte(Wide even, Wide odd, std::uint32_t threshold) {
    static constexpr std::uint8_t kFirst[16] = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
    const uint8x16x2_t words = {{bytes_of_words(even.low, odd.low), bytes_of_words(even.high, odd.high)}};
    const uint8x16_t first = vld1q_u8(kFirst), second = vaddq_u8(first, vdupq_n_u8(2));
    return at_most(vqtbl2q_u8(words, first), vqtbl2q_u8(words, second), threshold);
  }

 private:
  static FA_INLINE V widen(const Half*, uint16x4_t bits) { return V(vcvt_f32_f16(vreinterpret_f16_u16(bits))); }
  static FA_INLINE V widen(const BFloat16*, uint16x4_t bits) { return V(vreinterpretq_f32_u32(vshll_n_u16(bits, 16))); }
  static FA_INLINE uint16x4_t narrow(const Half*, V x) { return vreinterpret_u16_f16(vcvt_f16_f32(x.v)); }
  static FA_INLINE uint16x4_t narrow(const BFloat16*, V x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x.v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x.v, x.v), rounded, quiet), 16);
  }
  static FA_INLINE uint8x16_t bytes_of_words(uint64x2_t even, uint64x2_t odd) {
    return vreinterpretq_u8_u32(vtrn1q_u32(vreinterpretq_u32_u64(even), vreinterpretq_u32_u64(odd)));
  }
  // A bit for each byte of both, of the first one from bit 0 on.
  static FA_INLINE std::uint64_t at_most(uint8x16_t first, uint8x16_t second, std::uint32_t threshold) {
    static constexpr std::uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vld1q_u8(kBits), most = vdupq_n_u8(static_cast<std::uint8_t>(threshold));
    const auto of = [&](uint8x16_t x) { return vandq_u8(vcleq_u8(x, most), bits); };
    const uint8x16_t pairs = vpaddq_u8(of(first), of(second)), fours = vpaddq_u8(pairs, pairs);
    return vgetq_lane_u32(vreinterpretq_u32_u8(vpaddq_u8(fours, fours)), 0);
  }
};

}  // namespace flash_attn::cpu
