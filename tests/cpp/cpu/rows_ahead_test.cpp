// What is asked for ahead of its turn: none twice, none left out, nothing past what there is.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "cpu/backward_ahead.h"
#include "cpu/forward_ahead.h"
#include "planned.h"

namespace flash_attn::cpu {
namespace {

struct Recorded {
  static constexpr bool kAsksFar = true, kThroughMemory = true;
  static inline std::vector<const char*> lines, far;
  static inline std::vector<const void* const*> rows;
  static void ask(const void* line) { lines.push_back(static_cast<const char*>(line)); }
  static void ask_far(const void* line) { far.push_back(static_cast<const char*>(line)); }
  static void begin_row(const void* const* row) { rows.push_back(row); }
};

class LinesAheadTest : public testing::TestWithParam<index_t> {
 protected:
  void SetUp() override { Recorded::lines.clear(), Recorded::far.clear(), Recorded::rows.clear(); }
};

// Rows of whole lines, and of a part of their last one (80 bf16 features).
INSTANTIATE_TEST_SUITE_P(Bytes, LinesAheadTest, testing::Values(64, 160, 256, 2048));

TEST_P(LinesAheadTest, AreThoseOfTheRowsInTheirOrder) {
  constexpr index_t kRows = 5, kOffset = 32;
  const index_t bytes = GetParam(), lines = ceil_div(bytes, kCacheLine);
  std::vector<char> memory(std::size_t(4 * kRows * (bytes + kOffset)));
  // Rows of pages are in any order. One address more than rows is read.
  const void* addresses[kRows + 1 + kFarRows];
  for (index_t n = 0; n <= kRows + kFarRows; ++n) addresses[n] = memory.data() + (3 * n % 4) * (bytes + kOffset);

  const RowsToAsk rows{addresses, kOffset, bytes};
  LinesAhead<Recorded> ahead(rows);
  for (index_t n = 0; n < kRows * lines; ++n) ahead.ask();

  ASSERT_EQ(Recorded::lines.size(), std::size_t(kRows * lines));
  ASSERT_EQ(Recorded::far.size(), std::size_t(kRows * lines));
  for (index_t n = 0; n < kRows * lines; ++n) {
    const auto line_of = [&](const void* row) {
      return static_cast<const char*>(row) + kOffset + n % lines * kCacheLine;
    };
    EXPECT_EQ(Recorded::lines[std::size_t(n)], line_of(addresses[n / lines])) << "line " << n;
    EXPECT_EQ(Recorded::far[std::size_t(n)], line_of(addresses[n / lines + kFarRows])) << "line " << n;
  }
  ASSERT_EQ(Recorded::rows.size(), std::size_t(kRows));
  for (index_t n = 0; n < kRows; ++n) EXPECT_EQ(Recorded::rows[std::size_t(n)], addresses + n + 1);
}

// Heads that are more than rows have parts of rows.
TEST(LinesAhead, OfSharesAreAllOfTheirRows) {
  constexpr index_t kPart = 256;
  for (const auto& [rows, heads] : {std::pair<index_t, index_t>{16, 8}, {8, 8}, {8, 10}, {8, 16}, {8, 32}, {8, 3}}) {
    SCOPED_TRACE(testing::Message() << rows << " rows, " << heads << " heads");
    std::vector<char> memory(std::size_t(rows * heads * kPart));
    std::vector<const void*> addresses(std::size_t(rows + 1 + kFarRows), memory.data());  // In any order, as in pages.
    for (index_t n = 0; n < rows; ++n) addresses[std::size_t(n)] = memory.data() + (rows - 1 - n) * heads * kPart;
    Recorded::lines.clear();
    for (index_t i = 0; i < heads; ++i) {
      const RowsToAsk share = share_of_rows(addresses.data(), rows, i, heads, kPart);
      LinesAhead<Recorded> ahead(share);
      for (index_t n = 0; n < rows * kPart / kCacheLine; ++n) ahead.ask();
    }
    std::sort(Recorded::lines.begin(), Recorded::lines.end());
    std::vector<const char*> all;
    for (index_t at = 0; at < index_t(memory.size()); at += kCacheLine) all.push_back(memory.data() + at);
    EXPECT_EQ(Recorded::lines, all);
  }
}

struct WindowCase {
  index_t window, length;  // Sq = Sk; the window's left side, causal, -1 without one.
  index_t apart = 1;       // Rows lie so many times as far apart as their heads need.
  index_t queries = 128;   // Of a block, on processors that ask.
};

constexpr index_t kD = 32;
using Lines = std::multiset<const char*>;

// Of some rows of a head.
Lines lines_of(const Operand& x, index_t b, index_t h, Range rows) {
  Lines lines;
  for (index_t n = rows.begin; n < rows.end; ++n)
    for (index_t at = 0; at < kD * index_t(sizeof(float)); at += kCacheLine)
      lines.insert(row_at(x, sizeof(float), b, n, h) + at);
  return lines;
}
bool holds(const Lines& all, const Lines& some) {
  return std::all_of(some.begin(), some.end(), [&](const char* line) { return all.count(line) > 0; });
}

// Units of (b, hk).
class ForwardAheadTest : public testing::TestWithParam<WindowCase> {
 protected:
  using Target = Planned;
  static constexpr index_t kB = 2, kHk = 2, kGroup = 2, kH = kHk * kGroup;

  ForwardAheadTest() {
    Problem& p = f.problem;
    p.B = kB, p.H = kH, p.Hk = kHk, p.D = p.Dv = kD, p.Sq = p.Sk = S, p.Tq = p.Tk = kB * S;
    p.window_left = GetParam().window, p.window_right = 0;
    p.q = operand(q, kH), p.k = operand(k, kHk), p.v = operand(v, kHk), f.out = operand(out, kH);
  }
  Operand operand(std::vector<float>& x, index_t heads) const {
    const index_t row = GetParam().apart * heads * kD;
    x.resize(std::size_t(kB * S * row));
    return {x.data(), S * row, row, kD};
  }
  // What the strips of a block ask for, so many at a time.
  static Lines asked(NextRows next, index_t rows, index_t strips = 1) {
    Recorded::lines.clear();
    for (index_t r = 0; r < rows; r += strips * Target::kRows) {
      StripAsks asks(next, strips);
      for (index_t n = 0; n <= strips * next.share; ++n) asks.ask<Recorded>();
    }
    return {Recorded::lines.begin(), Recorded::lines.end()};
  }

  const index_t S = GetParam().length;
  ForwardProblem f;
  std::vector<float> q, k, v, out;
};

INSTANTIATE_TEST_SUITE_P(Windows, ForwardAheadTest,
                         testing::Values(WindowCase{0, 1024}, WindowCase{64, 1024}, WindowCase{200, 1024},
                                         WindowCase{512, 1024}, WindowCase{512, 1000}, WindowCase{200, 1000},
                                         WindowCase{-1, 1024}, WindowCase{200, 1000, 4, 64},
                                         WindowCase{512, 1024, 8, 32}, WindowCase{64, 1000, 16, 32},
                                         WindowCase{-1, 1024, 8}));

TEST_P(ForwardAheadTest, EveryTaskFindsWhatItLoadsAskedFor) {
  const Problem& p = f.problem;
  const Executor alone;
  const Units units(p);
  const ForwardPlan<Target> plan(f, alone, Approach::packed, units);
  const index_t queries = plan.tiles.queries;
  ASSERT_EQ(queries, asks_between_products() ? GetParam().queries : 128);
  const ForwardAhead<Target> ahead(plan);
  EXPECT_EQ(plan.alone, GetParam().window >= 0 && GetParam().window < 600);
  const auto first_of = [&](index_t hk, index_t nth) { return plan.block_in_turn(p.sequence(0), hk, nth) * queries; };
  // Keys that the first block of all packs: nobody could ask for them.
  const Range unasked = p.score_rule<float>(0, 0).visible_keys({first_of(0, 0), min_of(first_of(0, 0) + queries, S)});
  Lines all;
  for (index_t unit = 0; unit < units.count(); ++unit)
    for (index_t nth = 0; nth < plan.query_blocks; ++nth)
      for (index_t g = 0; g < kGroup; ++g) {
        const index_t first = first_of(units.hk(unit), nth);
        const index_t b = units.b(unit), h = units.hk(unit) * kGroup + g;
        const ScoreRule<float> rule = p.score_rule<float>(b, h);
        const index_t rows = min_of(queries, S - first);
        const Range keys = rule.visible_keys(Range{first, first + rows});
        SCOPED_TRACE(testing::Message() << "b " << b << ", head " << h << ", first query " << first);
        if (unit > 0 || g > 0 || nth > 0) {
          EXPECT_TRUE(holds(all, lines_of(p.q, b, h, {first, first + rows})));
        }
        // Parts are packed as a whole.
        const index_t begin = keys.begin / kPackedKeys * kPackedKeys, end = min_of(round_up(keys.end, kPackedKeys), S);
        for (index_t key = begin; key < end; ++key) {
          if (unit == 0 && unasked.begin / kPackedKeys * kPackedKeys <= key && key < round_up(unasked.end, kPackedKeys))
            continue;
          EXPECT_TRUE(holds(all, lines_of(p.k, b, units.hk(unit), {key, key + 1}))) << "key " << key;
          EXPECT_TRUE(holds(all, lines_of(p.v, b, units.hk(unit), {key, key + 1}))) << "key " << key;
        }
        const ForwardBlock<Target> block{b,     h,       1, first,   rows, nth, p.sequence(b),
                                         &rule, nullptr, 0, nullptr, keys, 0,   {}};
        EXPECT_EQ(ahead.of(block, unit).into_l2, prefetches_into_l2());
        const Lines now = asked(ahead.of(block, unit), block.rows);
        EXPECT_TRUE(holds(now, lines_of(f.out, b, h, {first, first + rows})));
        EXPECT_EQ(asked(ahead.of(block, unit), block.rows, kLaneQueries / Target::kRows), now);
        all.insert(now.begin(), now.end());
      }
  for (auto line = all.begin(); line != all.end(); ++line) {
    EXPECT_EQ(all.count(*line), 1u);
    const auto in = [&](const std::vector<float>& x) {
      const char* const begin = reinterpret_cast<const char*>(x.data());
      return *line >= begin && *line < begin + x.size() * sizeof(float);
    };
    EXPECT_TRUE(in(q) || in(k) || in(v) || in(out));
  }
}

// The same tasks backward: key blocks of a unit, each with the chunks of query blocks that see it.
class BackwardAheadTest : public testing::Test {
 protected:
  using Target = Planned;
  using Walk = BackwardWalk<Target>;
  static constexpr index_t kB = 2, kHk = 2, kGroup = 2, kH = kHk * kGroup, kS = 1900;

  Operand operand(index_t heads) {
    memory.emplace_back(std::size_t(kB * kS * heads * kD));
    return {memory.back().data(), kS * heads * kD, heads * kD, kD};
  }
  void expect_asked_once(std::int64_t left);

  std::vector<std::vector<float>> memory;
};

void BackwardAheadTest::expect_asked_once(std::int64_t left) {
  SCOPED_TRACE(testing::Message() << "window " << left);
  BackwardProblem backward;
  Problem& p = backward.problem;
  p.B = kB, p.H = kH, p.Hk = kHk, p.D = p.Dv = kD, p.Sq = p.Sk = kS, p.Tq = p.Tk = kB * kS;
  p.window_left = left, p.window_right = 0;
  p.q = operand(kH), p.k = operand(kHk), p.v = operand(kHk);
  backward.out = operand(kH), backward.dout = operand(kH);
  const Executor alone;
  const BackwardPlan<Target> plan(p, Sequences(), alone);
  const Walk walk(plan);
  Lines all;
  bool first_rows = true;
  for (index_t unit = 0; unit < plan.units.count(); ++unit)
    for (index_t kb = 0; kb < plan.key_blocks; ++kb) {
      const auto k = walk.keys_of(unit, kb);
      SCOPED_TRACE(testing::Message() << "unit " << unit << ", key block " << kb);
      for (const Operand* x : {&p.k, &p.v}) {
        EXPECT_EQ(holds(all, lines_of(*x, plan.units.b(unit), k.hk, k.keys)), unit > 0 || kb > 0);
      }
      RowsInTurn asks;
      BackwardAhead<Target> ahead(plan, walk, backward, k, asks);
      for (index_t c = 0; c < k.chunks; ++c) {
        walk.any_of_chunk(k, c, [&](index_t head, index_t block) {
          Walk::Rows r{};
          if (!walk.sees(k, head, block, r) || walk.key_blocks_of(r).begin != kb) return false;
          for (const Operand* x : {&p.q, &backward.dout, &backward.out}) {
            EXPECT_EQ(holds(all, lines_of(*x, r.b, r.h, {r.first, r.first + r.count})), !first_rows) << "chunk " << c;
          }
          first_rows = false;
          return false;
        });
        ahead.before_chunk(c);
        if (!walk.chunk_sees(k, c)) continue;
        Recorded::lines.clear();
        while (!asks.all_asked()) asks.ask<Recorded>();
        all.insert(Recorded::lines.begin(), Recorded::lines.end());
      }
    }
  EXPECT_EQ(std::set<const char*>(all.begin(), all.end()).size(), all.size());  // None twice.
}

TEST_F(BackwardAheadTest, EveryTaskFindsWhatItLoadsAskedFor) {
  for (const std::int64_t left : {0, 100, 512, 700, -1}) expect_asked_once(left);
}

// Rows that share the sets of an L1 of 32 KB and 8 ways take half of it at most.
TEST(RowsInL1Test, AreFewerTheFurtherApart) {
  EXPECT_EQ(rows_in_l1(128), kPrefetchRows);
  EXPECT_EQ(rows_in_l1(1024), 16);
  EXPECT_EQ(rows_in_l1(2048), 8);
  EXPECT_EQ(rows_in_l1(4096), 4);
  EXPECT_EQ(rows_in_l1(65536), 4);
}

// Rows of a window meet one key block, wherever it begins, if its packed keys fit in L2.
TEST(WindowTilesTest, HoldWhatNeighboursSee) {
  ForwardProblem f;
  Problem& p = f.problem;
  p.B = 1, p.H = p.Hk = 1, p.Sq = p.Sk = p.Tq = p.Tk = 1500, p.window_right = 0;
  const auto keys = [&](index_t D, index_t window) {
    p.D = p.Dv = D, p.window_left = window;
    const Units units(p);
    const ForwardPlan<Planned> plan(f, Executor(), Approach::packed, units);
    bool one = true;
    for (index_t first = 0; first < p.Sq; first += kQueryAlign) {
      ForwardBlock<Planned> block{};
      const ScoreRule<float> rule = p.score_rule<float>(0, 0);
      block.heads = 1, block.first = first, block.rules = &rule, block.sequence = p.sequence(0);
      const index_t end = rule.visible_keys(Range{first, min_of(first + kQueryAlign, p.Sq)}).end;
      one = one && end <= plan.first_key(block) + plan.tiles.keys;
    }
    return one ? plan.tiles.keys : -plan.tiles.keys;
  };
  EXPECT_EQ(keys(192, 200), 448);
  EXPECT_EQ(keys(192, 201), 448);
  EXPECT_EQ(keys(128, 512), 704);
  EXPECT_EQ(keys(128, 514), 768);
  EXPECT_EQ(keys(256, 200), -256);
  EXPECT_EQ(keys(128, -1), -512);
}

// Only caches that come from memory, in wide rows, are worth asking for in two steps, and only quick products idle.
TEST(AskingTest, DependsOnWhatThereIsToRead) {
  Problem p;
  const auto asking = [&](index_t B, index_t Sk, index_t Hk, index_t D, bool one_strip = false) {
    p.B = B, p.Sk = Sk, p.Hk = Hk, p.D = p.Dv = D;
    return asking_for(p, 2, one_strip);
  };
  const bool into_l2 = prefetches_into_l2();
  const Asking paced = idles_at_memory() ? Asking::into_l2_at_its_pace : Asking::into_l2;
  const auto expect = [&](Asking got, Asking of_l2, Asking of_l1) { EXPECT_EQ(got, into_l2 ? of_l2 : of_l1); };
  expect(asking(8, 16384, 8, 128), Asking::into_l2, Asking::into_l1_from_memory);
  expect(asking(8, 16384, 8, 128, true), paced, Asking::into_l1_at_its_pace);
  expect(asking(8, 16384, 16, 64, true), paced, Asking::into_l1_from_memory);
  expect(asking(1, 2048, 8, 128, true), Asking::into_l2, Asking::into_l1);
  expect(asking(8, 65536, 2, 128), Asking::into_l2, Asking::into_l1);
}

// Scores of short caches have the pitch that the loops know.
TEST(DirectTilesTest, AreOfAllSizesAlike) {
  for (const index_t D : {8, 128, 576})
    for (const index_t elem_size : {2, 4})
      for (const index_t strip_rows : {4, 6})
        EXPECT_EQ(forward_tiles(Approach::direct, D, D, elem_size, strip_rows, true).keys, kDirectKeys);
}

// A strip is multiplied as a whole, whatever rows it has.
TEST(PackedTilesTest, AreWholeStrips) {
  for (const index_t strip_rows : {4, 6, 8})
    for (const bool from_first : {false, true}) {
      const index_t queries = forward_tiles(Approach::packed, 64, 64, 4, strip_rows, from_first).queries;
      EXPECT_EQ(queries % query_align(strip_rows), 0);
      for (index_t part = queries; part >= 24; part /= 2) EXPECT_EQ(part % strip_rows, 0) << part;
      if (from_first) continue;
      EXPECT_EQ(queries, query_align(strip_rows));  // Where key blocks begin is a matter of so many.
    }
}

// Keys are the rows of strips, and the queries of a block are summed as many at a time, so that it can be cut.
TEST(BackwardTilesTest, AreWholeStripsOfSixAndWholeSums) {
  for (const index_t D : {8, 32, 64, 80, 96, 128, 192, 256})
    for (const bool addend_per_query : {false, true}) {
      const Tiles tiles = backward_tiles(D, D, sizeof(float), 6, addend_per_query);
      EXPECT_EQ(tiles.keys % 6, 0) << D;
      EXPECT_EQ(tiles.keys % kKeyAlign, 0) << D;
      EXPECT_EQ(tiles.queries % kScalarsPerSum, 0) << D;
    }
}

}  // namespace
}  // namespace flash_attn::cpu
