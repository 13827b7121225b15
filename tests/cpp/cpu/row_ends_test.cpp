// The end of a row's softmax, several rows at a time, against SoftmaxState's own functions in fp64.
#include "cpu/row_ends.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace flash_attn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Of numbers that are looked at around 1: all, but in an emulator, where all take 11 s.
#if defined(FLASH_ATTN_TESTS_EMULATED)
constexpr std::uint32_t kApart = 61;
#else
constexpr std::uint32_t kApart = 1;
#endif

double ulp_of(double x) { return std::ldexp(1.0, std::max(std::ilogb(x), -126) - 23); }

TEST(RowEnds, Log2IsWithinThreeUlp) {
  double most = 0;
  for (std::uint32_t bits = 0x00800000; bits < 0x7f800000; bits += 997) {
    const auto x = std::bit_cast<float>(bits);
    const double exact = std::log2(static_cast<double>(x));
    if (exact != 0) most = std::max(most, std::abs(log2_in_loops(x) - exact) / ulp_of(exact));
  }
  // Where it is small.
  for (auto bits = std::bit_cast<std::uint32_t>(0.5f); bits < std::bit_cast<std::uint32_t>(2.0f); bits += kApart) {
    const auto x = std::bit_cast<float>(bits);
    const double exact = std::log2(static_cast<double>(x));
    if (exact != 0) most = std::max(most, std::abs(log2_in_loops(x) - exact) / ulp_of(exact));
  }
  EXPECT_LE(most, 3.0);
  for (int e = -126; e < 128; ++e) EXPECT_EQ(log2_in_loops(std::ldexp(1.0f, e)), static_cast<float>(e));
  EXPECT_TRUE(std::isnan(log2_in_loops(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(log2_in_loops(std::numeric_limits<float>::infinity())));
}

// Of what is no sum, only that no difference of its bits overflows: for the sanitizer.
TEST(RowEnds, Log2TakesAnyBits) {
  float all = 0;
  for (std::uint32_t high = 0; high < 0x10000; ++high) all += log2_in_loops(std::bit_cast<float>(high << 16 | 0x5a5a));
  EXPECT_TRUE(std::isnan(all));
}

TEST(RowEnds, AreThoseOfEachState) {
  std::vector<SoftmaxState<float>> states = {{-3.5f, 7.25f}, {}, {100.0f, 1.0f}, {-kInfinity, 0.0f}, {0.0f, 2000.0f}};
  const std::vector<float> factors = {1.0f, 1.0f, 0.5f, 2.0f, 1.25f};
  for (index_t count = 1; count <= static_cast<index_t>(states.size()); ++count) {
    const RowEnds<float> ends(states.data(), factors.data(), count);
    std::vector<float> lse(3 * states.size(), -1.0f);
    ends.store_lse(lse.data(), 3);
    for (index_t r = 0; r < count; ++r) {
      EXPECT_FLOAT_EQ(lse[3 * r], states[r].lse());
      EXPECT_FLOAT_EQ(ends.factor[r], states[r].finish() * factors[r]);
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
      const bool of_a_row = i % 3 == 0 && i / 3 < static_cast<std::size_t>(count);
      EXPECT_EQ(lse[i] == -1.0f, !of_a_row);
    }
  }
}

TEST(RowEnds, NanStaysNan) {
  const SoftmaxState<float> state{1.0f, std::numeric_limits<float>::quiet_NaN()};
  const float factor = 1.0f;
  const RowEnds<float> ends(&state, &factor, 1);
  EXPECT_TRUE(std::isnan(ends.lse[0]));
  EXPECT_TRUE(std::isnan(ends.factor[0]));
}

}  // namespace
}  // namespace flash_attn::cpu
