// Host threads for callers that bring none. The torch binding brings torch's own, so that one process has one pool.
#pragma once

#include <atomic>

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

}  // namespace flash_attn
