#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <sys/resource.h>
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

// In groups, a task may wait for those before it in its own group, and one of no group for those of none.
TEST(ThreadPool, TasksOfGroupsMayWaitForEarlierOnes) {
  constexpr index_t kSize = 7;
  for (int threads : {1, 2, 4})
    for (index_t groups : {0, 1, 3, 4, 50})
      for (index_t more : {0, 1, 9}) {
        std::vector<std::atomic<index_t>> turns(static_cast<std::size_t>(groups + 1));
        parallel_for_groups(default_executor(threads), groups, kSize, more, [&](index_t i, int) {
          const index_t group = min_of(i / kSize, groups), turn = i - group * kSize;
          std::atomic<index_t>& at = turns[static_cast<std::size_t>(group)];
          while (at.load(std::memory_order_acquire) != turn) std::this_thread::yield();
          at.store(turn + 1, std::memory_order_release);
        });
        for (index_t group = 0; group < groups; ++group)
          EXPECT_EQ(turns[static_cast<std::size_t>(group)].load(), kSize);
        EXPECT_EQ(turns.back().load(), more);
      }
}

TEST(ThreadPool, GroupsWithoutTasksAreNoWork) {
  for (int threads : {1, 2})
    parallel_for_groups(default_executor(threads), 5, 0, 0, [](index_t, int) { ADD_FAILURE() << "a task"; });
}

// A worker that is kept busy by one group loses those that it has not begun, whole, to whoever has none left. Only then
// is it helped with its own.
TEST(ThreadPool, GroupsNotBegunAreTakenOver) {
  constexpr index_t kGroups = 10, kSize = 3;
  std::atomic<index_t> done{0};
  std::vector<std::atomic<int>> owner(kGroups);
  for (auto& worker : owner) worker = -1;
  parallel_for_groups(default_executor(2), kGroups, kSize, 0, [&](index_t i, int worker) {
    if (i == 0)
      while (done.load() != (kGroups - 1) * kSize) std::this_thread::yield();
    if (i < kSize) {
      EXPECT_EQ(done.load(), (kGroups - 1) * kSize) << i;
      return;
    }
    int before = -1;
    auto& of_group = owner[static_cast<std::size_t>(i / kSize)];
    EXPECT_TRUE(of_group.compare_exchange_strong(before, worker) || before == worker);
    done.fetch_add(1);
  });
}

TEST(ThreadPool, HasAsManyThreadsAsAreAskedFor) {
  for (const int threads : {1, 2, 7}) EXPECT_EQ(default_executor(threads).num_threads, threads);
  EXPECT_EQ(default_executor().num_threads, std::max(1, int(std::thread::hardware_concurrency())));
}

TEST(ThreadPool, NegativeThreadsAreAnError) { EXPECT_THROW(default_executor(-1), Error); }

// ThreadSanitizer does not follow a fork of a process with threads.
#if !defined(_WIN32) && !defined(__SANITIZE_THREAD__)
bool ends_well(pid_t child) {
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ThreadPool, WorksInAForkedChild) {
  count_all(default_executor(3), 10);
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> total{0};
    parallel_for(default_executor(3), 10, [&](index_t, int) { total.fetch_add(1); });
    _exit(total.load() == 10 ? 0 : 1);
  }
  EXPECT_TRUE(ends_well(child));
}
#endif

// Sanitizers' memory is beyond such a limit, and QEMU's own.
#if defined(__linux__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(FLASH_ATTN_TESTS_EMULATED)
// How many workers have a task at the same time, of those that come in time.
int workers_at_once(int threads, std::chrono::milliseconds time) {
  std::atomic<int> begun{0};
  std::atomic<bool> over{false};
  parallel_for(default_executor(threads), threads, [&](index_t, int) {
    if (over.load()) return;
    begun.fetch_add(1);
    const auto end = std::chrono::steady_clock::now() + time;
    while (begun.load() < threads && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    over.store(true);
  });
  return begun.load();
}

// So that no more of the process's address space is to be had than 1 MB, which is too little for a thread's stack.
void keep_address_space(rlimit limit) {
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  statm >> pages;
  limit.rlim_cur = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (1 << 20);
  setrlimit(RLIMIT_AS, &limit);
}

TEST(ThreadPool, ThreadsThatTheSystemRefusesAreDoneWithout) {
  constexpr int kThreads = 24;  // more than stacks of ended threads are kept for (glibc: 40 MB)
  const pid_t child = fork();
  if (child == 0) {
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    keep_address_space(limit);
    const int refused = workers_at_once(kThreads, std::chrono::milliseconds(100));
    setrlimit(RLIMIT_AS, &limit);
    // The next job asks for threads again.
    const int given = workers_at_once(kThreads, std::chrono::seconds(30));
    _exit(refused < kThreads && given == kThreads ? 0 : 1);
  }
  EXPECT_TRUE(ends_well(child));
}
#endif

}  // namespace
}  // namespace flash_attn
