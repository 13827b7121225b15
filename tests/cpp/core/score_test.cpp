#include "core/score.h"

#include <gtest/gtest.h>

#include <random>

namespace flash_attn {
namespace {

ScoreRule<double> rule(index_t Sq, index_t Sk, index_t left, index_t right) {
  ScoreRule<double> r{};
  r.scale_log2 = kLog2e;
  r.Sq = Sq;
  r.Sk = Sk;
  r.window_left = left;
  r.window_right = right;
  return r;
}

bool sees(const ScoreRule<double>& r, index_t i, index_t j) {
  const index_t diagonal = i + r.Sk - r.Sq;
  return (r.window_left < 0 || j >= diagonal - r.window_left) && (r.window_right < 0 || j <= diagonal + r.window_right);
}

// Every interval against the definition, for every small shape and window.
class Visibility : public ::testing::TestWithParam<std::tuple<int, int, int, int>> {};

TEST_P(Visibility, IntervalsFollowTheDefinition) {
  const auto [Sq, Sk, left, right] = GetParam();
  const ScoreRule<double> r = rule(Sq, Sk, left, right);
  for (index_t i = 0; i < Sq; ++i)
    for (index_t j = 0; j < Sk; ++j) {
      const Range keys = r.visible_keys(i), queries = r.visible_queries(j);
      EXPECT_EQ(sees(r, i, j), keys.begin <= j && j < keys.end) << i << " " << j;
      EXPECT_EQ(sees(r, i, j), queries.begin <= i && i < queries.end) << i << " " << j;
    }
}

TEST_P(Visibility, TileAnswersFollowTheDefinition) {
  const auto [Sq, Sk, left, right] = GetParam();
  const ScoreRule<double> r = rule(Sq, Sk, left, right);
  for (index_t i0 = 0; i0 < Sq; ++i0)
    for (index_t i1 = i0 + 1; i1 <= Sq; i1 += 2)
      for (index_t j0 = 0; j0 < Sk; ++j0)
        for (index_t j1 = j0 + 1; j1 <= Sk; j1 += 2) {
          bool any = false, all = true;
          for (index_t i = i0; i < i1; ++i)
            for (index_t j = j0; j < j1; ++j) (sees(r, i, j) ? any : all) = sees(r, i, j);
          const Cover cover = r.cover({i0, i1}, {j0, j1});
          // `some` where nothing or everything is visible would cost time, never be wrong; the others must be exact.
          EXPECT_FALSE(cover == Cover::none && any);
          EXPECT_FALSE(cover == Cover::all && !all);
          EXPECT_FALSE(all && cover != Cover::all);
          const Range hull = r.visible_keys(Range{i0, i1});
          for (index_t i = i0; i < i1; ++i)
            for (index_t j = 0; j < Sk; ++j) EXPECT_FALSE(sees(r, i, j) && (j < hull.begin || j >= hull.end));
        }
}

INSTANTIATE_TEST_SUITE_P(SmallShapes, Visibility,
                         ::testing::Combine(::testing::Values(1, 4, 7), ::testing::Values(1, 5, 8),
                                            ::testing::Values(-1, 0, 2), ::testing::Values(-1, 0, 3)));

// Row bounds and masks, on top of causal and windows.
class Tables : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  std::vector<std::int32_t> begin_, end_;
  std::vector<std::uint8_t> mask_;
  ScoreRule<double> tables(index_t Sq, index_t Sk, unsigned seed) {
    std::mt19937 random(seed);
    ScoreRule<double> r = rule(Sq, Sk, seed % 3 == 0 ? 2 : -1, seed % 2 == 0 ? 1 : -1);
    for (index_t i = 0; i < Sq; ++i) {
      begin_.push_back(std::int32_t(random() % (Sk + 4)) - 2);
      end_.push_back(begin_.back() + std::int32_t(random() % (Sk + 2)) - 1);
    }
    for (index_t n = 0; n < Sq * Sk; ++n) mask_.push_back(random() % 4 != 0);
    if (seed % 4 != 1) r.bounds = {begin_.data(), end_.data(), 1, 1};
    if (seed % 4 != 2) r.mask = {mask_.data(), Sk, 1};
    return r;
  }
};

TEST_P(Tables, AnswersFollowTheDefinition) {
  const auto [Sq, Sk] = GetParam();
  for (unsigned seed = 0; seed < 12; ++seed) {
    begin_.clear(), end_.clear(), mask_.clear();
    const ScoreRule<double> r = tables(Sq, Sk, seed);
    const auto expected = [&](index_t i, index_t j) {
      const bool within = !r.bounds.given() || (begin_[i] <= j && j < end_[i]);
      return sees(r, i, j) && within && (!r.mask.given() || mask_[i * Sk + j]);
    };
    for (index_t i0 = 0; i0 < Sq; ++i0)
      for (index_t i1 = i0 + 1; i1 <= Sq; ++i1) {
        const Range hull = r.visible_keys(Range{i0, i1});
        for (index_t j0 = 0; j0 < Sk; ++j0)
          for (index_t j1 = j0 + 1; j1 <= Sk; ++j1) {
            bool any = false, all = true;
            for (index_t i = i0; i < i1; ++i)
              for (index_t j = j0; j < j1; ++j) {
                const bool seen = expected(i, j);
                EXPECT_EQ(r.sees(i, j), seen) << i << " " << j;
                EXPECT_FALSE(seen && (j < hull.begin || j >= hull.end));
                EXPECT_FALSE(seen && (i < r.visible_queries(j).begin || i >= r.visible_queries(j).end));
                (seen ? any : all) = seen;
              }
            const Cover cover = r.cover({i0, i1}, {j0, j1});
            EXPECT_FALSE(cover == Cover::none && any);
            EXPECT_EQ(cover == Cover::all, all);
          }
      }
  }
}

INSTANTIATE_TEST_SUITE_P(SmallShapes, Tables, ::testing::Combine(::testing::Values(1, 5), ::testing::Values(1, 6)));

TEST(Logit, SoftcapThenAlibi) {
  ScoreRule<double> r = rule(4, 4, -1, -1);
  r.scale_log2 = 0.5 * kLog2e;
  EXPECT_NEAR(r.logit(3.0, 0.0) / kLog2e, 1.5, 1e-15);
  r.softcap_log2 = 2.0 * kLog2e;
  r.inverse_softcap = 0.25;
  EXPECT_NEAR(r.logit(3.0, 0.0) / kLog2e, 2.0 * std::tanh(0.75), 1e-15);
  EXPECT_NEAR(r.slope_of_logit(3.0), 1.0 - std::tanh(0.75) * std::tanh(0.75), 1e-15);
  r.slope_log2 = 0.125 * kLog2e;
  EXPECT_NEAR(r.logit(3.0, -6.0) / kLog2e, 2.0 * std::tanh(0.75) - 0.75, 1e-15);
  EXPECT_NEAR(r.logit_of_capped(std::tanh(0.75), -6.0) / kLog2e, 2.0 * std::tanh(0.75) - 0.75, 1e-15);
}

}  // namespace
}  // namespace flash_attn
