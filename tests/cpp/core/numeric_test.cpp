#include "core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>

namespace flash_attn {
namespace {

TEST(Half, EveryValueSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Half h{std::uint16_t(bits)};
    const float x = to_float(h);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(to_float(from_float<Half>(x))));
      continue;
    }
    const int exponent = int(bits >> 10 & 31u), fraction = int(bits & 1023u);
    const double magnitude = exponent == 31  ? INFINITY
                             : exponent == 0 ? std::ldexp(fraction, -24)
                                             : std::ldexp(1024 + fraction, exponent - 25);
    EXPECT_EQ(x, bits & 0x8000u ? -magnitude : magnitude);
    EXPECT_EQ(from_float<Half>(x).bits, bits);
  }
}

TEST(Half, RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7bffu; ++bits) {
    const float low = to_float(Half{std::uint16_t(bits)}), high = to_float(Half{std::uint16_t(bits + 1)});
    const float middle = low + (high - low) / 2;
    EXPECT_EQ(from_float<Half>(middle).bits, bits % 2 ? bits + 1 : bits) << bits;
    EXPECT_EQ(from_float<Half>(std::nextafter(middle, low)).bits, bits);
    EXPECT_EQ(from_float<Half>(std::nextafter(middle, high)).bits, bits + 1);
  }
  EXPECT_EQ(from_float<Half>(65519.99f).bits, 0x7bffu);
  EXPECT_EQ(from_float<Half>(65520.0f).bits, 0x7c00u);
  EXPECT_EQ(from_float<Half>(-1e30f).bits, 0xfc00u);
}

TEST(BFloat16, RoundsToNearestEven) {
  EXPECT_EQ(from_float<BFloat16>(1.0f).bits, 0x3f80u);
  EXPECT_EQ(from_float<BFloat16>(bit_cast<float>(0x3f808000u)).bits, 0x3f80u);
  EXPECT_EQ(from_float<BFloat16>(bit_cast<float>(0x3f818000u)).bits, 0x3f82u);
  EXPECT_EQ(from_float<BFloat16>(bit_cast<float>(0x3f808001u)).bits, 0x3f81u);
  EXPECT_EQ(from_float<BFloat16>(bit_cast<float>(0x7f7fffffu)).bits, 0x7f80u);
  EXPECT_TRUE(std::isnan(to_float(from_float<BFloat16>(bit_cast<float>(0x7f800001u)))));
}

}  // namespace
}  // namespace flash_attn
