// Half and bfloat16 as 16-bit storage, with IEEE conversions that compilers can vectorise.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace gfxsim {

struct Half {
  std::uint16_t bits;
};
struct Bfloat {
  std::uint16_t bits;
};

inline float to_float(Half h) {
  const std::uint32_t magnitude = std::uint32_t(h.bits & 0x7fff) << 13;
  // Multiplying by 2^112 rebiases the exponent and normalises denormals; infinities and NaN need the full exponent.
  std::uint32_t out = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  out = (h.bits & 0x7c00) == 0x7c00 ? (magnitude | 0x7f800000u) : out;
  return std::bit_cast<float>(out | std::uint32_t(h.bits & 0x8000) << 16);
}

inline float to_float(Bfloat b) { return std::bit_cast<float>(std::uint32_t(b.bits) << 16); }

// Round to nearest even; NaN stays NaN (quiet).
inline Half to_half(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint16_t sign = std::uint16_t(bits >> 16 & 0x8000);
  // Below 2^-14 the addition of 0.5 leaves the mantissa of the denormal, correctly rounded, in the low bits.
  const std::uint32_t denormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  std::uint32_t out = magnitude < 0x38800000u ? denormal : normal;
  out = magnitude >= 0x477ff000u ? 0x7c00u : out;
  out = magnitude > 0x7f800000u ? (0x7e00u | (magnitude >> 13 & 0x3ff)) : out;
  return {std::uint16_t(out | sign)};
}

// Rounds a double once. The float in between is rounded to odd, so that the second rounding sees whether bits were
// lost.
inline Half to_half(double d) {
  float f = float(d);
  if (std::isfinite(f) && double(f) != d) {
    std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
    if (std::fabs(double(f)) > std::fabs(d)) --bits;
    f = std::bit_cast<float>(bits | 1u);
  } else if (std::isinf(f) && std::isfinite(d)) {
    f = std::copysign(3.0e38f, f);
  }
  return to_half(f);
}

inline Half to_half_toward_zero(float f) {
  const Half nearest = to_half(f);
  if (!std::isfinite(f)) return nearest;
  return std::fabs(to_float(nearest)) > std::fabs(f) ? Half{std::uint16_t(nearest.bits - 1)} : nearest;
}

inline Bfloat to_bfloat(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {std::uint16_t(bits >> 16 | 0x40)};
  return {std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

// a * b + c of floats or halves, rounded to odd in double: rounding that once more, to float or half, gives the right
// result.
inline double fma_to_odd(float a, float b, float c) {
  const double product = double(a) * double(b), addend = c;  // exact
  const double sum = product + addend;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  if (!std::isfinite(sum) || error == 0.0) return sum;
  std::uint64_t bits = std::bit_cast<std::uint64_t>(sum);
  if ((error < 0.0) != (sum < 0.0)) --bits;
  return std::bit_cast<double>(bits | 1u);
}

inline Half half_fma(Half a, Half b, Half c) { return to_half(fma_to_odd(to_float(a), to_float(b), to_float(c))); }

}  // namespace gfxsim
