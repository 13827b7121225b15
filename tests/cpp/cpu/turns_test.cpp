// In which turn query blocks come: each once, and not those of the same rows at once where threads are many and results
// are large.
#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "cpu/backward_walk.h"
#include "planned.h"

namespace flash_attn::cpu {
namespace {

constexpr index_t kHk = 4, kGroup = 2, kD = 32;

Executor executor_of(int threads) {
  Executor executor;
  executor.num_threads = threads;
  return executor;
}

Problem problem_of(index_t B, index_t queries, index_t keys) {
  Problem p;
  p.B = B, p.H = kHk * kGroup, p.Hk = kHk, p.D = p.Dv = kD, p.Sq = queries, p.Sk = keys;
  p.Tq = B * queries, p.Tk = B * keys;
  return p;
}

class ForwardTurns : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ForwardTurns, testing::Values(1, 3, 4, 8));

TEST_P(ForwardTurns, AreEachBlocksOnce) {
  for (const auto& [B, window] : {std::pair<index_t, index_t>{20, -1}, {20, 200}, {2, -1}}) {
    ForwardProblem f;
    f.problem = problem_of(B, 2000, 2000);  // The output takes 2 MB for each of B.
    f.problem.window_left = window, f.problem.window_right = window < 0 ? -1 : 0;
    const Executor executor = executor_of(GetParam());
    const Units units(f.problem);
    const ForwardPlan<Planned> plan(f, executor, Approach::packed, units);
    EXPECT_EQ(plan.alone, window >= 0);
    const index_t blocks = plan.blocks_of(f.problem.sequence(0));
    ASSERT_GT(blocks, kHk);
    std::set<index_t> firsts;
    for (index_t hk = 0; hk < kHk; ++hk) {
      std::set<index_t> all;
      for (index_t nth = 0; nth < blocks; ++nth) all.insert(plan.block_in_turn(f.problem.sequence(0), hk, nth));
      EXPECT_EQ(index_t(all.size()), blocks);
      EXPECT_EQ(*all.begin(), 0);
      EXPECT_EQ(*all.rbegin(), blocks - 1);
      firsts.insert(plan.block_in_turn(f.problem.sequence(0), hk, 0));
    }
    const bool apart = GetParam() >= 4 && B == 20;
    EXPECT_EQ(firsts.size(), apart ? std::size_t(kHk) : 1u);
    if (!apart) {
      EXPECT_EQ(*firsts.begin(), plan.alone ? 0 : blocks - 1);
    }
  }
}

// (Head of the group, uncut block) in the order in which they meet a key head's only key block, each once.
std::vector<std::pair<index_t, index_t>> turns_of(const Problem& p, index_t hk, int threads) {
  const Executor executor = executor_of(threads);
  const BackwardPlan<Planned> plan(p, Sequences(), executor);
  const BackwardWalk<Planned> walk(plan);
  EXPECT_EQ(plan.key_blocks, 1);
  const auto k = walk.keys_of(hk, 0);
  std::vector<std::pair<index_t, index_t>> turns;
  std::set<std::pair<index_t, index_t>> all;
  index_t part = 0;
  for (index_t c = 0; c < k.chunks; ++c)
    walk.any_of_chunk(k, c, [&](index_t head, index_t block) {
      EXPECT_TRUE(all.insert({head, block}).second);
      const std::pair<index_t, index_t> turn{head, block / plan.parts};
      // The parts of a block come one after another, from the first to the last, as its products would sum them.
      if (turns.empty() || turns.back() != turn) {
        turns.push_back(turn), part = 0;
      }
      EXPECT_EQ(block % plan.parts, part++);
      return false;
    });
  EXPECT_EQ(index_t(all.size()), plan.blocks_of(k.sequence));
  return turns;
}

TEST(BackwardTurns, AreEachBlocksOnceAndTheSameForAnyThreads) {
  for (const index_t queries : {1, 100, 700, 2000, 2050}) {
    SCOPED_TRACE(testing::Message() << queries << " queries");
    const Problem p = problem_of(2, queries, 40);
    std::set<index_t> firsts;
    for (index_t hk = 0; hk < kHk; ++hk) {
      const auto turns = turns_of(p, hk, 1);
      for (const int threads : {2, 5, 16, 64}) EXPECT_EQ(turns_of(p, hk, threads), turns);
      firsts.insert(turns[0].second);
    }
    if (queries >= 2000) {
      EXPECT_EQ(firsts.size(), std::size_t(kHk));
    }
  }
}

}  // namespace
}  // namespace flash_attn::cpu
