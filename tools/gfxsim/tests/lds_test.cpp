// The shadow of LDS: which accesses of waves are ordered.
#include "lds.h"

#include "harness.h"

namespace gfxsim::testing {
namespace {

// Waves whose LDS operations are numbered by hand.
class Shadow : public ::testing::Test {
 protected:
  Shadow() {
    for (int i = 0; i < 3; ++i) {
      waves.push_back(std::make_unique<Wave>());
      waves.back()->id = i;
      waves.back()->target = &find_target("gfx942");
    }
    lds.reset(64, 3);
  }
  int access(int wave, LdsAccess kind, std::uint32_t number) {
    return lds.access(waves, *waves[std::size_t(wave)], 5, 3, kind, number, false);
  }
  // All waves pass a barrier; the first of them with so many operations complete.
  void barrier(const std::vector<std::uint32_t>& complete) {
    for (std::size_t i = 0; i < waves.size(); ++i) {
      waves[i]->complete_at[++waves[i]->signals & 3][0] = complete[i];
      ++waves[i]->passed;
    }
  }
  std::vector<std::unique_ptr<Wave>> waves;
  Lds lds;
};

TEST_F(Shadow, EveryAtomicIsBeforeARead) {
  for (const int late : {0, 1}) {
    SCOPED_TRACE(late);
    lds.reset(64, 3);
    EXPECT_EQ(access(0, LdsAccess::atomic, 10), -1);
    EXPECT_EQ(access(1, LdsAccess::atomic, 10), -1);
    barrier({late == 0 ? 9u : 10u, late == 1 ? 9u : 10u, 0});
    EXPECT_EQ(access(2, LdsAccess::read, 1), late);
    EXPECT_EQ(access(2, LdsAccess::write, 2), late);
    barrier({10, 10, 2});
    EXPECT_EQ(access(2, LdsAccess::read, 3), -1);
  }
}

TEST_F(Shadow, AWriteIsBeforeEveryAtomic) {
  EXPECT_EQ(access(0, LdsAccess::write, 5), -1);
  EXPECT_EQ(access(0, LdsAccess::atomic, 6), -1);
  EXPECT_EQ(access(1, LdsAccess::atomic, 1), 0);
  barrier({6, 1, 0});
  EXPECT_EQ(access(1, LdsAccess::atomic, 2), -1);
  EXPECT_EQ(access(2, LdsAccess::atomic, 1), -1);
}

}  // namespace
}  // namespace gfxsim::testing
