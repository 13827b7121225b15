#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace flash_attn {
namespace {

void count_all(const Executor& executor, index_t n) {
  std::vector<std::atomic<int>> counts(n);
  parallel_for(executor, n, [&](index_t i, int worker) {
    EXPECT_LT(worker, worker_count(executor, n));
    counts[i].fetch_add(1);
  });
  for (const auto& count : counts) EXPECT_EQ(count.load(), 1);
}

TEST(ThreadPool, EveryTaskRunsOnce) {
  for (int threads : {1, 2, 3, 8})
    for (index_t n : {0, 1, 2, 7, 1000}) count_all(default_executor(threads), n);
}

TEST(ThreadPool, ManyCallersTakeTurns) {
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([] {
      for (int repeat = 0; repeat < 50; ++repeat) count_all(default_executor(3), 20);
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPool, CallsInsideAJobRunInPlace) {
  std::atomic<int> total{0};
  const Executor executor = default_executor(3);
  parallel_for(executor, 5,
               [&](index_t, int) { parallel_for(executor, 4, [&](index_t, int) { total.fetch_add(1); }); });
  EXPECT_EQ(total.load(), 20);
}

// A task may wait for one with a smaller index: that one is running or done, whatever the number of threads.
TEST(ThreadPool, TasksMayWaitForEarlierOnes) {
  for (int threads : {1, 2, 4}) {
    std::atomic<index_t> turn{0};
    parallel_for(default_executor(threads), 200, [&](index_t i, int) {
      while (turn.load(std::memory_order_acquire) != i) std::this_thread::yield();
      turn.store(i + 1, std::memory_order_release);
    });
    EXPECT_EQ(turn.load(), 200);
  }
}

// In groups, a task may wait for those before it in its own group.
TEST(ThreadPool, TasksOfGroupsMayWaitForEarlierOnes) {
  for (int threads : {1, 2, 4})
    for (index_t groups : {1, 3, 4, 50}) {
      std::vector<std::atomic<index_t>> turns(static_cast<std::size_t>(groups));
      parallel_for_groups(default_executor(threads), groups, 7, [&](index_t i, int) {
        std::atomic<index_t>& turn = turns[static_cast<std::size_t>(i / 7)];
        while (turn.load(std::memory_order_acquire) != i % 7) std::this_thread::yield();
        turn.store(i % 7 + 1, std::memory_order_release);
      });
      for (const auto& turn : turns) EXPECT_EQ(turn.load(), 7);
    }
}

TEST(ThreadPool, NegativeThreadsAreAnError) { EXPECT_THROW(default_executor(-1), Error); }

// ThreadSanitizer does not follow a fork of a process with threads.
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
TEST(ThreadPool, WorksInAForkedChild) {
  count_all(default_executor(3), 10);
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> total{0};
    parallel_for(default_executor(3), 10, [&](index_t, int) { total.fetch_add(1); });
    _exit(total.load() == 10 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace
}  // namespace flash_attn
