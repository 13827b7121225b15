// Memory that is asked for ahead of its turn.
#pragma once

#include <cassert>
#include <cstdint>
#include <utility>

#include "cpu/cpuid.h"
#include "cpu/target.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

// Where memory that is asked for ahead of its turn goes: into L1, or into L2 only (see prefetches_into_l2). What comes
// from memory and not from a cache is asked for at memory's pace.
enum class Asking { into_l1, into_l1_from_memory, into_l1_at_its_pace, into_l2, into_l2_at_its_pace };
FA_INLINE bool goes_into_l2(Asking asking) {
  return asking == Asking::into_l2 || asking == Asking::into_l2_at_its_pace;
}

// How a line is asked for (ask), one far behind it if kAsksFar (ask_far), and what begins a row (begin_row).
// kAfterProducts: after those of a step. kThroughMemory: the next line's address is stored and loaded again. Loads wait
// behind prefetches that find no buffer, and this way so does the next prefetch.
struct IntoL1 {
  static constexpr bool kAfterProducts = false, kAsksFar = false, kThroughMemory = false;
  static FA_INLINE void ask(const void* line) { FA_PREFETCH(line); }
  static FA_INLINE void begin_row(const void* const*) {}
};
// From memory, not from a cache, a prefetch into L1 holds a miss buffer for long, and the loads behind it up. A line of
// each KB is asked for kFarRows earlier: it has the address translated, and the processor's own prefetchers begin.
struct IntoL1FromMemory : IntoL1 {
  static constexpr bool kAfterProducts = true, kAsksFar = true, kThroughMemory = true;
  static FA_INLINE void ask_far(const void* line) {
    if (reinterpret_cast<std::uintptr_t>(line) % 1024 < kCacheLine) FA_PREFETCH(line);
  }
};
// A prefetch into L2 waits for the translation of its address, which one line of each row, kFarRows earlier, takes care
// of.
struct IntoL2 {
  static constexpr bool kAfterProducts = false, kAsksFar = false, kThroughMemory = false;
  static FA_INLINE void ask(const void* line) { FA_PREFETCH_L2(line); }
  static FA_INLINE void begin_row(const void* const* row) { FA_PREFETCH(row[kFarRows]); }
};
// Lines that are asked for faster than memory gives them stand in each other's way: quick products idle for that many
// instructions after each.
template <class Into, int Idle>
struct AtItsPace : Into {
  static constexpr bool kThroughMemory = true;
  static FA_INLINE void ask(const void* line) {
    Into::ask(line);
    idle(std::make_integer_sequence<int, Idle>());
  }

 private:
  template <int... N>
  static FA_INLINE void idle(std::integer_sequence<int, N...>) {
    (no_operation(N), ...);
  }
  static FA_INLINE void no_operation(int) { FA_NOP(); }
};

// Rows ahead of the one in work that are asked for: those of one head lie too far apart for the caches' own
// prefetchers.
inline constexpr index_t kPrefetchRows = 16;

// How many of them L1 has room for. Of rows that lie a multiple of 4 KB apart, lines share a set, which has 8 of them
// or more: half of the sets' room for what is asked for.
FA_INLINE index_t rows_in_l1(index_t row_bytes) {
  constexpr index_t kRoom = index_t(16) << 10, kLeast = 4;
  return max_of(kLeast, min_of(kPrefetchRows, kRoom / max_of<index_t>(row_bytes, 1)));
}

template <class Into = IntoL1>
FA_INLINE void prefetch_row(const void* row, index_t bytes) {
  for (index_t byte = 0; byte < bytes; byte += kCacheLine) Into::ask(static_cast<const char*>(row) + byte);
}

// A row that is not read soon: into L2 where the processor is quick at that (prefetches_into_l2), else into L1, from
// where it moves on to L2.
FA_INLINE void prefetch_row_for_later(bool into_l2, const void* row, index_t bytes) {
  into_l2 ? prefetch_row<IntoL2>(row, bytes) : prefetch_row<IntoL1>(row, bytes);
}

// For loops over rows, `left` of them from this one on, of which `ahead` are in L1. What lies further ahead is asked
// for its address translation, which prefetches wait for, a page or half of one for each row.
FA_INLINE void prefetch_rows_ahead(const char* row, index_t row_bytes, index_t bytes, index_t left, index_t ahead) {
  if (left > 3 * kPrefetchRows) FA_PREFETCH(row + 3 * kPrefetchRows * row_bytes);
  if (left > ahead) prefetch_row(row + ahead * row_bytes, bytes);
}

// Rows of memory to ask for, `bytes` of each, which begin `offset` bytes after the addresses, but for `skipped` bytes
// of the first one.
struct RowsToAsk {
  const void* const* first;
  index_t offset, bytes, skipped = 0;
};

// Share `i` of `count` of so many rows, each of `count` parts of `bytes`, in the order of memory. Where there are more
// parts than rows, a share is some of a row.
FA_INLINE RowsToAsk share_of_rows(const void* const* first, index_t rows, index_t i, index_t count, index_t bytes) {
  return {first + rows * i / count, 0, count * bytes, rows * i % count * bytes};
}

// Their lines, one by one. As long as no more are asked for than n rows have, the addresses of n + 1 rows are read, and
// those of as many kFarRows on.
template <class Into>
class LinesAhead {
 public:
  FA_INLINE explicit LinesAhead(const RowsToAsk& rows) : rows_(&rows), row_(rows.first) {
    begin_row();
    line_ += rows.skipped;
    if constexpr (Into::kAsksFar) far_ += rows.skipped;
  }
  explicit LinesAhead(RowsToAsk&&) = delete;  // It is pointed to.

  FA_INLINE void ask() {
    Into::ask(line_);
    if constexpr (Into::kAsksFar) {
      Into::ask_far(far_);
      far_ += kCacheLine;
    }
    line_ += kCacheLine;
    if constexpr (Into::kThroughMemory) FA_THROUGH_MEMORY(line_);
    if (line_ < end_) return;
    Into::begin_row(++row_);
    begin_row();
  }

 private:
  FA_INLINE void begin_row() {
    line_ = static_cast<const char*>(*row_) + rows_->offset;
    end_ = line_ + rows_->bytes;
    if constexpr (Into::kAsksFar) far_ = static_cast<const char*>(row_[kFarRows]) + rows_->offset;
  }

  const RowsToAsk* rows_;
  const void* const* row_;
  const char* line_;
  const char* end_;
  const char* far_ = nullptr;
};

// Rows of a head for the strips of a block to ask for, in their turn, too far apart for the processor's own
// prefetchers. Forced inline, also since GCC 12 drops calls of a function that does nothing but prefetch.
struct RowsAhead {
  const char* row;  // The next of `left`.
  index_t row_bytes, bytes, left;
  index_t share;  // Rows for a strip.

  template <class Into>
  FA_INLINE void ask() {
    if (left == 0) return;
    const char* line = row;
    index_t rest = bytes;
    do {
      Into::ask(line);
      line += kCacheLine, rest -= kCacheLine;
    } while (rest > 0);
    row += row_bytes, --left;
  }
};

// Such rows of several operands.
struct NextRows {
  RowsAhead rows[4];
  int count;
  index_t share;  // The greatest of theirs.
  bool into_l2;   // Or into L1, as in prefetch_row_for_later.

  FA_INLINE void add(const RowsAhead& more) {
    rows[count++] = more;
    share = max_of(share, more.share);
  }
};

// Such rows of several operands, one operand after another.
class RowsInTurn {
 public:
  static constexpr int kMost = 5;  // Operands.

  FA_INLINE void clear() { count_ = at_ = 0; }
  FA_INLINE void add(const RowsAhead& rows) {
    assert(count_ < kMost);
    rows_[count_++] = rows;
  }
  FA_INLINE bool all_asked() const { return at_ == count_; }
  template <class Into = IntoL1>
  FA_INLINE void ask() {
    if (all_asked()) return;
    RowsAhead& rows = rows_[at_];
    rows.ask<Into>();
    if (rows.left == 0) ++at_;
  }

 private:
  RowsAhead rows_[kMost];
  int count_ = 0, at_ = 0;
};

// Whether strips ask for what the next task loads: between products where those can hide it, and where products are
// made in tiles, between the weights of rows. Those of numbers in parts take so long that there is little to gain, and
// beside vectors of 256 bits it costs a Zen 3 more than it saves (docs/cpu-avx2.md).
template <class Target>
FA_INLINE bool asks_ahead() {
  return Target::kTiled ? Target::kParts == 1 : Target::Simd::W == 16 && asks_between_products();
}

// What a strip asks for, a row of each operand at a time: between the panels of its products. A prefetch waits for the
// translation of its address, which the products hide, and holds a miss buffer, of which they need some.
class StripAsks {
 public:
  FA_INLINE explicit StripAsks(NextRows& next, index_t strips = 1) : next_(next), strips_(strips) {}

  FA_INLINE void ask() {
    if (next_.into_l2)
      ask<IntoL2>();
    else
      ask<IntoL1>();
  }
  template <class Into>
  FA_INLINE void ask() {
    if (asked_ == strips_ * next_.share) return;
    for (int n = 0; n < next_.count; ++n)
      if (asked_ < strips_ * next_.rows[n].share) next_.rows[n].template ask<Into>();
    ++asked_;
  }
  FA_INLINE void ask_rest() {
    while (asked_ < strips_ * next_.share) ask();
  }

 private:
  NextRows& next_;
  const index_t strips_;  // For so many.
  index_t asked_ = 0;
};

}  // namespace flash_attn::cpu
