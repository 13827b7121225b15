// Host threads for callers that bring none. The torch binding brings torch's own, so that one process has one pool.
#pragma once

#include <atomic>
#include <vector>

#include "core/platform.h"
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

// The same for `groups` groups of `size` tasks, group by group: a worker takes groups of its own, whose tasks share
// what is in its caches, and helps the others when it has none left. Only the tasks of a group are handed out in order,
// so a task may wait for smaller ones of its group.
template <class Task>
void parallel_for_groups(const Executor& executor, index_t groups, index_t size, const Task& task) {
  const int workers = worker_count(executor, groups * size);
  if (workers == 1 || executor.run == nullptr) return parallel_for(executor, groups * size, task);
  struct alignas(64) Share {
    std::atomic<index_t> next;
    index_t end;
  };
  struct Shared {
    std::vector<Share> shares;
    const Task* task;
  } shared{std::vector<Share>(static_cast<std::size_t>(workers)), &task};
  for (index_t w = 0; w < workers; ++w) {
    Share& share = shared.shares[static_cast<std::size_t>(w)];
    share.next.store(w * groups / workers * size, std::memory_order_relaxed);
    share.end = (w + 1) * groups / workers * size;
  }
  executor.run(
      executor.context, workers,
      [](void* arg, int worker) {
        auto& s = *static_cast<Shared*>(arg);
        for (std::size_t k = 0; k < s.shares.size(); ++k) {
          Share& share = s.shares[(static_cast<std::size_t>(worker) + k) % s.shares.size()];
          for (index_t i; (i = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) (*s.task)(i, worker);
        }
      },
      &shared);
}

}  // namespace flash_attn
