#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/slots.h"

namespace flash_attn::cpu {
namespace {

TEST(Slots, WorkersTakeWhatTheyGaveBackLast) {
  Slots slots(4, 2);
  const index_t a = slots.take(0), b = slots.take(0);
  EXPECT_NE(a, b);
  slots.give(a, 0);
  slots.give(b, 0);
  EXPECT_EQ(slots.take(0), b);
  EXPECT_EQ(slots.take(0), a);
}

TEST(Slots, WorkersTakeFromOthersWhenTheirsAreGone) {
  Slots slots(3, 2);
  std::vector<bool> taken(3);
  for (int i = 0; i < 3; ++i) {
    const index_t slot = slots.take(1);
    EXPECT_FALSE(taken[static_cast<std::size_t>(slot)]);
    taken[static_cast<std::size_t>(slot)] = true;
  }
  slots.give(2, 1);
  EXPECT_EQ(slots.take(0), 2);
}

TEST(Slots, NoTwoHoldersAtATime) {
  constexpr int kWorkers = 4;
  Slots slots(kWorkers, kWorkers);
  std::atomic<int> holders[kWorkers]{};
  std::atomic<int> collisions{0};
  parallel_for(default_executor(kWorkers), 2000, [&](index_t, int worker) {
    const index_t slot = slots.take(worker);
    if (holders[slot].fetch_add(1) != 0) collisions.fetch_add(1);
    holders[slot].fetch_sub(1);
    // Not to the one that took it: slots wander among the workers.
    slots.give(slot, (worker + 1) % kWorkers);
  });
  EXPECT_EQ(collisions.load(), 0);
}

}  // namespace
}  // namespace flash_attn::cpu
