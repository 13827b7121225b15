// Units of work: one (batch element, key/value head) each, taken in waves so that packed operands stay bounded.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "core/problem.h"
#include "core/softmax.h"
#include "cpu/pack.h"

namespace flash_attn::cpu {

// Rows of one key head that meet keys together when these are packed where they are used.
inline constexpr index_t kRowsTogether = 64;

// Rows per key head (queries times query heads of a group), by which it is chosen how K and V reach them. Where heads
// have few queries each, there are never more than kRowsTogether: one by one these heads would leave their strips
// empty, as those of 128 heads that share a key head in decoding (multi-head latent attention).
FA_INLINE index_t rows_together(index_t queries, index_t group) {
  constexpr index_t kFewQueries = 12;
  return queries < kFewQueries ? min_of(queries * group, kRowsTogether) : queries * group;
}

// The lengths of a sequence as a number, by which backward's kernels are chosen: its queries or its keys, whichever are
// fewer, but 0 where both are few. Queries of a group of heads, which share what is done for keys, count up to thrice.
inline constexpr index_t kFewOfBoth = 16;
FA_INLINE index_t shorter_length(index_t queries, index_t keys, index_t group) {
  constexpr index_t kMostOfGroup = 3;
  return max_of(queries, keys) <= kFewOfBoth ? 0 : min_of(queries * min_of(group, kMostOfGroup), keys);
}

inline constexpr Range kAny{0, std::numeric_limits<index_t>::max()};

// The sequences that kernels are for: ranges of rows_together, of keys, of shorter_length and of queries, and for
// backward which of all (few_rows.h), where up to so many queries are direct.
struct Sequences {
  enum class Which { all, folded, direct, others };
  Range rows = kAny, keys = kAny, lengths = kAny, queries = kAny;
  Which which = Which::all;
  index_t direct_queries = 0;

  bool have(const Problem& p, const Sequence& sequence) const;
};

class Units {
 public:
  explicit Units(const Problem& p, const Sequences& sequences = {});
  ~Units();
  Units(const Units&) = delete;
  Units& operator=(const Units&) = delete;

  FA_INLINE index_t count() const { return count_ * p_.Hk; }
  FA_INLINE index_t b(index_t unit) const { return sequences_[unit / p_.Hk]; }
  FA_INLINE index_t hk(index_t unit) const { return unit % p_.Hk; }
  // Of the actual sequences; max_seqlen may be far above.
  FA_INLINE index_t longest_q() const { return longest_q_; }
  FA_INLINE index_t longest_k() const { return longest_k_; }

  // Puts the units of those sequences last that have so much of the work that share(units), for as many units of
  // theirs as all would be, and their length in keys, is true; returns how many units these are.
  template <class Share>
  index_t put_last(const Share& share) {
    const auto scores = [&](index_t b) { return double(p_.sequence(b).q_len) * double(p_.sequence(b).k_len); };
    double all = 0;
    for (index_t n = 0; n < count_; ++n) all += scores(sequences_[n]);
    // By hand: libstdc++'s std::stable_partition calls a function that clang warns is deprecated.
    std::vector<index_t> large;
    index_t* rest = sequences_;
    for (index_t n = 0; n < count_; ++n) {
      const index_t b = sequences_[n];
      const double own = scores(b);
      if (own != 0 && share(all / own * double(p_.Hk), p_.sequence(b).k_len))
        large.push_back(b);
      else
        *rest++ = b;
    }
    std::copy(large.begin(), large.end(), rest);
    return index_t(large.size()) * p_.Hk;
  }

  // What malloc has to map anew for each call, from 32 MB on, costs a page fault per 4 KB.
  static FA_INLINE bool quick_to_allocate(index_t bytes) { return bytes <= kQuickBytes; }
  // Units of a wave: as many as fit in 64 MB, at least one; as are quick to allocate where that gives the threads work
  // enough.
  FA_INLINE index_t wave(index_t unit_bytes, index_t unit_tasks, index_t threads) const {
    const auto fit = [&](index_t bytes) { return bytes / max_of<index_t>(unit_bytes, 1); };
    const bool few = fit(kQuickBytes) >= threads && fit(kQuickBytes) * unit_tasks >= 16 * threads;
    const index_t most = max_of<index_t>(1, fit(few ? kQuickBytes : kMostBytes));
    return max_of<index_t>(1, ceil_div(count(), max_of<index_t>(1, ceil_div(count(), most))));
  }

 private:
  static constexpr index_t kQuickBytes = index_t(28) << 20, kMostBytes = index_t(64) << 20;

  const Problem& p_;
  index_t* const sequences_;
  index_t count_ = 0, longest_q_ = 0, longest_k_ = 0;
};

// What kernels do not write: the slack of their results, and S_dmask past what a row sees.
void clear_unwritten(const ForwardProblem& f);
void clear_unwritten(const BackwardProblem& b);

// Columns [begin, end) of a row, as kernels write them past a mask's edge.
template <class Real>
FA_INLINE void fill(Real* row, index_t begin, index_t end, Real value) {
  for (index_t c = begin; c < end; ++c) row[c] = value;
}

}  // namespace flash_attn::cpu
