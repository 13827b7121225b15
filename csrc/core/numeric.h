// fp16 and bf16 as storage, with round-to-nearest-even conversions. Portable; backends have faster ones with the same
// result.
#pragma once

#include "core/platform.h"

namespace flash_attn {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <class To, class From>
FA_INLINE To bit_cast(From from) {
  return __builtin_bit_cast(To, from);  // std::bit_cast is a host function to a device compiler.
}

FA_INLINE float to_float(float x) { return x; }
FA_INLINE double to_float(double x) { return x; }
FA_INLINE float to_float(BFloat16 x) { return bit_cast<float>(std::uint32_t(x.bits) << 16); }
FA_INLINE float to_float(Half x) {
  const std::uint32_t sign = std::uint32_t(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // 2^112 moves fp16's exponent bias to fp32's; subnormals come out right because fp32 has exponents to spare.
  const float value = bit_cast<float>(magnitude << 13) * bit_cast<float>(0x77800000u);
  return bit_cast<float>(sign | bit_cast<std::uint32_t>(value));
}

template <class T>
FA_INLINE T from_float(float x);

template <>
FA_INLINE float from_float<float>(float x) {
  return x;
}
template <>
FA_INLINE BFloat16 from_float<BFloat16>(float x) {
  const auto bits = bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return {std::uint16_t(bits >> 16 | 0x40u)};  // Rounding could make a NaN infinite.
  return {std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
FA_INLINE Half from_float<Half>(float x) {
  const auto bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {std::uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {std::uint16_t(sign | 0x7c00u)};  // 65520 and above round to infinity.
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the wanted bits, rounded by the fp32 adder, at the bottom of the sum.
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return {std::uint16_t(sign | (bit_cast<std::uint32_t>(sum) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return {std::uint16_t(sign | (rounded - 0x38000000u) >> 13)};
}

}  // namespace flash_attn
