// What depends on the rows of queries that meet each key head of a sequence: kernels, approach, rows of products; and
// on its keys and lengths: kernels.
#pragma once

#include <limits>

#include "cpu/score_tables.h"
#include "cpu/target.h"
#include "cpu/units.h"

namespace flash_attn::cpu {

// Rows per key head up to which others are faster than blocks of tiles: in bf16 rows of memory as tiles; in fp16
// vectors, as a strip as high as tiles would be half empty at best; and tiles of fp32 are up to twice as fast as
// vectors only, and so for whole blocks of rows that others have packed K and V for.
template <class Target>
inline constexpr index_t kTooFewForTiles = Target::kParts == 1   ? kTileBlock
                                           : Target::kParts == 2 ? kTileRows
                                                                 : kRowsTogether;
// Rows per key head up to which vectors are faster than rows of memory as tiles, most of which are empty then.
inline constexpr index_t kTooFewForRowTiles = 4;

// Keys up to which vectors are faster than tiles forward, as each number is cut into parts first; in bf16, none.
template <class Target>
inline constexpr index_t kTooFewKeysForTiles = Target::kParts == 1   ? 0
                                               : Target::kParts == 2 ? 16
                                                                     : 63;
// The shorter_length up to which vectors are faster than tiles backward: in bf16 only where all lengths are few.
template <class Target>
inline constexpr index_t kTooShortForTiles = Target::kParts == 1   ? 0
                                             : Target::kParts == 2 ? 8
                                                                   : 63;

// Most rows per key head of an approach. Direct sums are in another order than backward's, which the reference
// precision does not allow itself; blocks of tiles read packed panels only.
template <class Target>
constexpr index_t most_rows(Approach approach) {
  if (Target::kDirectTiles) return approach == Approach::direct ? Target::kRows : 0;
  if (approach == Approach::packed) return std::numeric_limits<index_t>::max();
  if (approach == Approach::in_place) return kRowsTogether;
  return std::is_same_v<typename Target::Real, float> && !Target::kTiled ? 4 * Target::kRows : 0;
}

// Whether some sequences of a problem may have queries that all see all keys by the same rule, and whether one does: by
// its own lengths, so that its bits do not depend on the others of a batch.
FA_INLINE bool may_see_alike(const Problem& p) { return has_plain_scores(p) && !p.dropout.active; }
FA_INLINE bool sees_alike(const Problem& p, const Sequence& sequence) {
  return may_see_alike(p) && (p.window_left < 0 || p.window_left >= sequence.k_len - 1) &&
         (p.window_right < 0 || p.window_right >= sequence.q_len - 1);
}

// Backward: up to how many queries of a head are met together with those of the heads that it shares keys with, as
// those of one head (folded_queries.h), and those of which sequences are. To copy them takes longer than it saves where
// they meet as few keys.
inline constexpr index_t kFoldedQueries = 32;
FA_INLINE bool may_fold(const Problem& p) { return p.group() > 1 && may_see_alike(p); }
FA_INLINE bool is_folded(const Problem& p, const Sequence& sequence) {
  return may_fold(p) && 0 < sequence.q_len && sequence.q_len <= min_of(kFoldedQueries, sequence.k_len - 1) &&
         sees_alike(p, sequence);
}

// Backward: those sequences whose queries, up to so many, meet K and V where they are (backward_direct.h).
FA_INLINE bool may_be_direct(const Problem& p) { return p.group() == 1 && p.softcap == 0 && may_see_alike(p); }
FA_INLINE bool is_direct(const Problem& p, const Sequence& sequence, index_t most) {
  return may_be_direct(p) && 0 < sequence.q_len && sequence.q_len <= most && sees_alike(p, sequence);
}
// How many are faster so than by a target's blocks.
template <class Target>
inline constexpr index_t kDirectQueries = Target::kTiled          ? Target::kParts == 1 ? 12 : 24
                                          : Target::Simd::W == 16 ? 32
                                                                  : 20;
inline constexpr index_t kMostDirectQueries = 32;

// Keys of a range that is merged with others, of a sequence of so many, where rows of K and V are read where they are:
// fewer in short sequences whose key heads are few, so that a single one keeps many threads busy.
FA_INLINE index_t direct_range_keys(const Problem& p, index_t keys) {
  constexpr index_t kTasks = 16, kLeast = 2 * kDirectKeys;
  const index_t for_tasks = ceil_div(keys, ceil_div(kTasks, p.Hk));
  return min_of(max_of(for_tasks, kLeast), kInPlaceKeys);
}

// Key heads of a sequence, `most` at most, that a task meets side by side where rows of K and V are read where they
// are: in the order of memory. Fewer where several threads would have less than four tasks each, of all `ranges` of a
// key head. Two threads that begin at once need no more than one each, if those end together; four and more took up
// to 1.4 times as long so, and so do two that have to wake first (docs/cpu-decoding.md).
FA_INLINE index_t heads_side_by_side(index_t Hk, index_t most, index_t ranges, const Executor& executor) {
  const index_t threads = executor.num_threads;
  const bool at_once = threads == 1 || (threads == 2 && executor.waits_awake);
  const auto suffices = [&](index_t heads) {
    const bool by_count = ceil_div(ranges / heads, threads) * heads == ceil_div(ranges, threads);
    return ranges >= 4 * threads * heads || (at_once && by_count);
  };
  index_t heads = min_of(Hk, most);
  while (heads > 1 && (Hk % heads > 0 || !suffices(heads))) --heads;
  return heads;
}

// Rows of a strip that products take, of a block of so many: as few as there are, if a tile holds them all.
template <class Target>
FA_INLINE constexpr index_t rows_of_products(index_t rows) {
  return Target::kDirectTiles && rows <= kTileRows ? rows : Target::kRows;
}

}  // namespace flash_attn::cpu
