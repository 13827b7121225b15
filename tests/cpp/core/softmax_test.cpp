#include "core/softmax.h"

#include <gtest/gtest.h>

namespace flash_attn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One row whose value is 1 for key j: o is then sum of p, and o * finish() must be 1.
SoftmaxState<double> state_of(std::initializer_list<double> scores) {
  SoftmaxState<double> s;
  for (double score : scores) {
    s.raise(score);
    s.l += std::exp2(score - s.shift());
  }
  return s;
}

TEST(SoftmaxState, EmptyRow) {
  SoftmaxState<double> s;
  EXPECT_EQ(s.raise(-kInfinity), 1.0);
  EXPECT_TRUE(s.empty());
  EXPECT_EQ(s.shift(), 0.0);
  EXPECT_EQ(s.finish(), 0.0);
  EXPECT_EQ(s.lse(), kInfinity);
}

TEST(SoftmaxState, OrderDoesNotMatter) {
  EXPECT_NEAR(state_of({1, 5, -3}).lse(), state_of({-3, 1, 5}).lse(), 1e-15);
  EXPECT_NEAR(state_of({1, 5, -3}).lse(), std::log(std::exp2(1) + std::exp2(5) + std::exp2(-3)), 1e-14);
}

TEST(SoftmaxState, MergeIsTheStateOfAllKeys) {
  SoftmaxState<double> a = state_of({1, 5}), b = state_of({9, -2});
  double from_a = 0, from_b = 0;
  a.merge(b, from_a, from_b);
  EXPECT_NEAR(a.lse(), state_of({1, 5, 9, -2}).lse(), 1e-14);
  EXPECT_NEAR(from_a, std::exp2(5.0 - 9.0), 1e-15);
  EXPECT_EQ(from_b, 1.0);
}

TEST(SoftmaxState, MergeWithEmptyKeepsTheOther) {
  const SoftmaxState<double> full = state_of({3, 4});
  double from_this = -1, from_other = -1;
  SoftmaxState<double> a = full;
  a.merge({}, from_this, from_other);
  EXPECT_EQ(a.lse(), full.lse());
  EXPECT_EQ(from_this, 1.0);
  EXPECT_EQ(from_other, 0.0);
  SoftmaxState<double> b;
  b.merge(full, from_this, from_other);
  EXPECT_EQ(b.lse(), full.lse());
  EXPECT_EQ(from_this, 0.0);
  EXPECT_EQ(from_other, 1.0);
  SoftmaxState<double> c;
  c.merge({}, from_this, from_other);
  EXPECT_TRUE(c.empty());
  EXPECT_EQ(c.lse(), kInfinity);
}

}  // namespace
}  // namespace flash_attn
