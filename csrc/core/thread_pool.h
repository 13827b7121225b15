// Host threads for callers that bring none. The torch binding brings torch's own, so that one process has one pool.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "core/platform.h"
#include "core/range.h"
#include "flash_attn/attention.h"

namespace flash_attn {

/// Runs task(index, worker) for every index in [0, n). Tasks are handed out in order, so a task may wait for one with a
/// smaller index: that one is running or done. `worker` is in [0, worker_count(executor, n)).
FA_INLINE int worker_count(const Executor& executor, index_t n) {
  return static_cast<int>(max_of<index_t>(1, min_of<index_t>(executor.num_threads, n)));
}

template <class Task>
void parallel_for(const Executor& executor, index_t n, const Task& task) {
  const int workers = worker_count(executor, n);
  if (workers == 1 || executor.run == nullptr) {
    for (index_t i = 0; i < n; ++i) task(i, 0);
    return;
  }
  struct Shared {
    std::atomic<index_t> next{0};
    index_t n;
    const Task* task;
  } shared;
  shared.n = n;
  shared.task = &task;
  executor.run(
      executor.context, workers,
      [](void* arg, int worker) {
        auto& s = *static_cast<Shared*>(arg);
        for (index_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.n;) (*s.task)(i, worker);
      },
      &shared);
}

// The groups of a worker in parallel_for_groups: tasks [begin, end), begun at the front and taken away at the end. That
// there are none is seen without the lock, whose line many workers would send to and fro; a lock that spins, since
// whoever holds it does for some nanoseconds.
class Share {
 public:
  void set(Range tasks) {
    const Lock lock(locked_);
    begin_.store(tasks.begin, std::memory_order_relaxed);
    end_.store(tasks.end, std::memory_order_relaxed);
  }
  // `shrinks`: groups may be taken away meanwhile.
  bool take(index_t& task, bool shrinks) {
    if (left() <= 0) return false;
    if (!shrinks) return (task = begin_.fetch_add(1, std::memory_order_relaxed)) < end_.load(std::memory_order_relaxed);
    const Lock lock(locked_);
    if (left() <= 0) return false;
    task = begin_.load(std::memory_order_relaxed);
    begin_.store(task + 1, std::memory_order_relaxed);
    return true;
  }
  // The last group, of `size` tasks, if it has not been begun.
  bool take_group(index_t size, Range& group) {
    if (left() < size) return false;
    const Lock lock(locked_);
    if (left() < size) return false;
    group.end = end_.load(std::memory_order_relaxed);
    group.begin = group.end - size;
    end_.store(group.begin, std::memory_order_relaxed);
    return true;
  }

 private:
  index_t left() const { return end_.load(std::memory_order_relaxed) - begin_.load(std::memory_order_relaxed); }

  class Lock {
   public:
    explicit Lock(std::atomic_flag& flag) : flag_(flag) {
      while (flag_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    ~Lock() { flag_.clear(std::memory_order_release); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    std::atomic_flag& flag_;
  };

  alignas(64) std::atomic_flag locked_ = ATOMIC_FLAG_INIT;
  std::atomic<index_t> begin_{0}, end_{0};
};

// The same for `groups` groups of `size` tasks, group by group, and then `more` tasks: a worker takes groups of its
// own, whose tasks share what is in its caches, then whole ones of others, so that their lengths may differ, then tasks
// of no group, and helps with begun groups at last. Only the tasks of a group, and those of none, are handed out in
// order, so a task may wait for smaller ones of its group.
template <class Task>
void parallel_for_groups(const Executor& executor, index_t groups, index_t size, index_t more, const Task& task) {
  const index_t in_groups = groups * size;
  const int workers = worker_count(executor, in_groups + more);
  if (workers == 1 || executor.run == nullptr) return parallel_for(executor, in_groups + more, task);
  struct Shared {
    std::vector<Share> shares;
    std::atomic<index_t> more;  // The next one.
    index_t end, size;
    bool several;  // Where each has one group at most, none changes hands: who looks for work could miss it.
    const Task* task;

    void work(int worker) {
      const auto share = [&](std::size_t k) -> Share& {
        return shares[(static_cast<std::size_t>(worker) + k) % shares.size()];
      };
      const auto run = [&](Share& tasks) {
        for (index_t i; tasks.take(i, several);) (*task)(i, worker);
      };
      run(share(0));
      Range group;
      for (std::size_t k = 1; k < shares.size() && several; ++k)
        while (share(k).take_group(size, group)) {
          share(0).set(group);
          run(share(0));
        }
      for (index_t i; (i = more.fetch_add(1, std::memory_order_relaxed)) < end;) (*task)(i, worker);
      for (std::size_t k = 1; k < shares.size(); ++k) run(share(k));
    }
  } shared{std::vector<Share>(static_cast<std::size_t>(workers)),
           in_groups,
           in_groups + more,
           max_of<index_t>(size, 1),
           groups > workers,
           &task};
  for (index_t w = 0; w < workers; ++w)
    shared.shares[static_cast<std::size_t>(w)].set({w * groups / workers * size, (w + 1) * groups / workers * size});
  executor.run(
      executor.context, workers, [](void* arg, int worker) { static_cast<Shared*>(arg)->work(worker); }, &shared);
}

}  // namespace flash_attn
