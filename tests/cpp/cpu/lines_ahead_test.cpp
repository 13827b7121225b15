// The lines that decoding asks for ahead of their turn: none twice, none left out, no address read past those there
// are.
#include <gtest/gtest.h>

#include <vector>

#include "cpu/direct_rows.h"

namespace flash_attn::cpu {
namespace {

struct Recorded {
  static inline std::vector<const char*> lines;
  static inline std::vector<const void* const*> rows;
  static void ask(const void* line) { lines.push_back(static_cast<const char*>(line)); }
  static void begin_row(const void* const* row) { rows.push_back(row); }
};

class LinesAheadTest : public testing::TestWithParam<index_t> {
 protected:
  void SetUp() override { Recorded::lines.clear(), Recorded::rows.clear(); }
};

// Rows of whole lines, and of a part of their last one (80 bf16 features).
INSTANTIATE_TEST_SUITE_P(Bytes, LinesAheadTest, testing::Values(64, 160, 256, 2048));

TEST_P(LinesAheadTest, AreThoseOfTheRowsInTheirOrder) {
  constexpr index_t kRows = 5, kOffset = 32;
  const index_t bytes = GetParam(), lines = ceil_div(bytes, kCacheLine);
  std::vector<char> memory(std::size_t(4 * kRows * (bytes + kOffset)));
  // Rows of pages are in any order. One address more than rows is read.
  const void* addresses[kRows + 1];
  for (index_t n = 0; n <= kRows; ++n) addresses[n] = memory.data() + (3 * n % kRows) * (bytes + kOffset);

  const RowsToAsk rows{addresses, kOffset, bytes};
  LinesAhead ahead(rows);
  for (index_t n = 0; n < kRows * lines; ++n) ahead.ask<Recorded>();

  ASSERT_EQ(Recorded::lines.size(), std::size_t(kRows * lines));
  for (index_t n = 0; n < kRows * lines; ++n)
    EXPECT_EQ(Recorded::lines[std::size_t(n)],
              static_cast<const char*>(addresses[n / lines]) + kOffset + n % lines * kCacheLine)
        << "line " << n;
  ASSERT_EQ(Recorded::rows.size(), std::size_t(kRows));
  for (index_t n = 0; n < kRows; ++n) EXPECT_EQ(Recorded::rows[std::size_t(n)], addresses + n + 1);
}

// Scores of short caches have the pitch that the loops know.
TEST(DirectTilesTest, AreOfAllSizesAlike) {
  for (const index_t D : {8, 128, 576})
    for (const index_t elem_size : {2, 4})
      for (const index_t strip_rows : {4, 6})
        EXPECT_EQ(forward_tiles(Approach::direct, D, D, elem_size, strip_rows).keys, kDirectKeys);
}

}  // namespace
}  // namespace flash_attn::cpu
