// How many key heads a task of few rows meets side by side.
#include "cpu/few_rows.h"

#include <gtest/gtest.h>

namespace flash_attn::cpu {
namespace {

Executor threads(int count, bool awake) {
  Executor executor;
  executor.num_threads = count;
  executor.waits_awake = awake;
  return executor;
}

index_t heads(index_t Hk, index_t ranges, const Executor& executor, index_t most = 64) {
  return heads_side_by_side(Hk, most, ranges, executor);
}

TEST(HeadsSideBySide, AreAllForOneThread) {
  EXPECT_EQ(heads(8, 8, threads(1, false)), 8);
  EXPECT_EQ(heads(7, 14, threads(1, true)), 7);
}

TEST(HeadsSideBySide, LeaveFourTasksToEachThread) {
  EXPECT_EQ(heads(8, 16, threads(2, false)), 2);
  EXPECT_EQ(heads(20, 40, threads(2, false)), 5);
  EXPECT_EQ(heads(8, 16, threads(4, true)), 1);
  EXPECT_EQ(heads(8, 1024, threads(16, false)), 8);
}

TEST(HeadsSideBySide, AreATaskForEachOfTwoThreadsThatBeginAtOnce) {
  EXPECT_EQ(heads(8, 16, threads(2, true)), 8);
  EXPECT_EQ(heads(20, 40, threads(2, true)), 20);
  EXPECT_EQ(heads(32, 32, threads(2, true)), 16);
}

TEST(HeadsSideBySide, LeaveNoThreadWithoutWork) {
  EXPECT_EQ(heads(5, 5, threads(2, true)), 1);    // One head more for one of the two.
  EXPECT_EQ(heads(12, 36, threads(2, true)), 6);  // Six tasks, three each, where three of twelve would be two and one.
}

TEST(HeadsSideBySide, AreNoMoreThanThereIsMemoryFor) {
  EXPECT_EQ(heads(8, 16, threads(2, true), 5), 4);
  EXPECT_EQ(heads(8, 16, threads(1, true), 1), 1);
}

}  // namespace
}  // namespace flash_attn::cpu
