#include "cpu/workspace.h"

#include <flash_attn/attention.h>
#include <gtest/gtest.h>

#include <thread>

namespace flash_attn::cpu {
namespace {

constexpr index_t kMB = index_t(1) << 20;
index_t most_kept() { return (32 + index_t(std::thread::hardware_concurrency())) * kMB; }

// In a thread that has kept none from other tests; what it keeps goes with it.
template <class Work>
void in_new_thread(const Work& work) {
  std::thread(work).join();
}

char* allocate_and_release(index_t bytes) { return Workspace(bytes).data(); }

TEST(Workspace, IsKeptForTheThreadsNextCall) {
  in_new_thread([] {
    char* const first = allocate_and_release(most_kept());
    EXPECT_EQ(allocate_and_release(kMB), first);
    EXPECT_EQ(allocate_and_release(most_kept()), first);
  });
}

TEST(Workspace, LargerOnesGoBack) {
  in_new_thread([] {
    cpu_workspace_peak();
    const index_t before = cpu_workspace_peak();
    allocate_and_release(most_kept() + 1);
    EXPECT_EQ(cpu_workspace_peak(), before + most_kept() + 1);
    EXPECT_EQ(cpu_workspace_peak(), before);
  });
}

TEST(Workspace, OneInsideOfAnotherHasItsOwnMemory) {
  in_new_thread([] {
    const Workspace outer(kMB);
    const Workspace inner(kMB);
    EXPECT_NE(outer.data(), inner.data());
  });
}

}  // namespace
}  // namespace flash_attn::cpu
