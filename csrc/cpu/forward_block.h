// What the forward pass works on: a block of rows, the memory of a worker, and the sizes that a call settles once.
#pragma once

#include "core/softmax.h"
#include "core/thread_pool.h"
#include "cpu/cpuid.h"
#include "cpu/direct_rows.h"
#include "cpu/exponentials.h"
#include "cpu/few_rows.h"
#include "cpu/lanes.h"
#include "cpu/packed_keys.h"
#include "cpu/results.h"
#include "cpu/rows_ahead.h"
#include "cpu/score_tables.h"
#include "cpu/target.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

// Some queries and query heads of a sequence; its rows are (query, head), heads being neighbours.
template <class Target>
struct ForwardBlock {
  using Real = typename Target::Real;

  index_t b, h, heads, first, rows;
  index_t nth;  // Of its sequence's blocks, by their turn (ForwardPlan::block_in_turn).
  Sequence sequence;
  const ScoreRule<Real>* rules;    // heads
  const typename Target::Elem* q;  // Its rows, as products take them, q_stride apart.
  index_t q_stride;
  typename Target::Elem* packed;
  Range keys;     // What its rows see.
  index_t front;  // Packed keys from this one on lie at the front of their memory, those before it at the end.
  NextRows next;

  FA_INLINE index_t head(index_t r) const { return heads == 1 ? h : h + r % heads; }
  FA_INLINE index_t query(index_t r) const { return first + (heads == 1 ? r : r / heads); }
  FA_INLINE StripA<typename Target::Elem> strip(index_t r) const {
    return {q + r * q_stride, q_stride, Target::Format::kStep};
  }
  FA_INLINE const ScoreRule<Real>& rule(index_t r) const { return rules[heads == 1 ? 0 : r % heads]; }

  // The smallest interval that holds all keys that some of the rows see, mask aside.
  FA_INLINE Range seen(Range rows_seen) const {
    const Range queries{query(rows_seen.begin), query(rows_seen.end - 1) + 1};
    Range hull = rules[0].visible_keys(queries);
    for (index_t g = 1; g < heads && rules[0].bounds.given(); ++g) {
      const Range other = rules[g].visible_keys(queries);
      if (hull.empty())
        hull = other;
      else if (!other.empty())
        hull = {min_of(hull.begin, other.begin), max_of(hull.end, other.end)};
    }
    return hull;
  }
};

// The part of a key block that a strip of rows sees, as columns of the block.
struct Columns {
  index_t origin;      // Key of column 0.
  index_t begin, end;  // Whole vectors around what is visible; none: nothing is.
  Range seen;          // A bit more than what is visible, zeros elsewhere in P.
  index_t keys;        // Keys in the block.
  bool plain;          // Visible scores are products, perhaps capped, times a factor, and each row sees an interval.
  Range inner;         // Whole vectors that all rows see, mask aside; none if rows have bounds.

  FA_INLINE bool uniform() const { return plain && inner.begin == begin && inner.end == end; }
};

// The memory of a worker.
template <class Target>
struct ForwardScratch {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;

  // A block's own.
  ForwardBlock<Target>* block;
  ScoreRule<Real>* rules;  // heads
  Elem* rows;              // queries x q_stride
  Real* o;                 // queries x o_stride
  SoftmaxState<Real>* state;
  PairSums<Target> pairs;  // of rows, when scores come in pairs
  // Of whatever is in work.
  Elem* staging;          // see PackedKeys; queries on their way into tiles, when direct
  Elem* packed;           // a key block, when packed in place; what a block of queries sees, when a worker's own
  index_t* parts;         // which parts those are, by their place
  const void** stream;    // see ForwardDirect
  Real* scores;           // kRows x keys; when direct queries x keys, a block's own
  Elem* probabilities;    // likewise; the memory of scores when they are of the same type
  Columns* columns;       // of each strip of a block, when direct
  Real* sums;             // queries x sums_stride, when direct: what a key block adds to o
  std::uint8_t* dropout;  // kRowsAbreast x keys, rounded up to 256, a bit each; in tiles kRows x kKeyAlign
  Real* addend;           // keys, when there is a bias or a mask
  Lanes<Target> lanes;    // of sequences whose queries are in the lanes
  index_t bytes;
};

// What a range of key blocks gives, to be merged with others.
template <class Target>
struct ForwardPartial {
  typename Target::Real* o;  // rows x o_stride
  SoftmaxState<typename Target::Real>* state;
  index_t bytes;
};

// How direct products ask for K and V, whose elements have `size` bytes. What is larger than last-level caches usually
// are comes from memory; rows that are narrow, all heads together, have no lines to spare for what is asked for
// earlier. Products of one strip and heads that are not small are quicker than memory.
FA_INLINE Asking asking_for(const Problem& p, index_t size, bool one_strip) {
  constexpr index_t kCaches = index_t(32) << 20, kShared = index_t(20) << 20, kWide = 2048, kLong = 128;
  index_t keys = 0;  // There; caches and max_seqlen_k may be far longer.
  for (index_t b = 0; b < p.B; ++b) keys += p.sequence(b).k_len;
  const index_t bytes = keys * p.Hk * (p.D + p.Dv) * size;
  // Measured on a Zen 4, whose last-level cache of 32 MB has other users.
  if (prefetches_into_l2())
    return bytes > kShared && one_strip && idles_at_memory() ? Asking::into_l2_at_its_pace : Asking::into_l2;
  if (bytes <= kCaches || p.Hk * p.D * size < kWide) return Asking::into_l1;
  return one_strip && min_of(p.D, p.Dv) >= kLong ? Asking::into_l1_at_its_pace : Asking::into_l1_from_memory;
}

template <class Target>
struct ForwardPlan {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  static constexpr index_t kWidth = Target::kWidth, kRows = Target::kRows, kNeighbours = query_align(kRows);
  static constexpr bool kInPlace = std::is_same_v<Elem, Real>;  // P can overwrite the scores.
  static constexpr index_t kManyThreads = 4;

  ForwardPlan(const ForwardProblem& forward, const Executor& executor, Approach how, const Units& these)
      : f(forward),
        p(f.problem),
        approach(how),
        units(these),
        format(row_format<Target>(p.dtype)),
        store_out(result_rows(format, f.out, p.Dv, p.Tq * p.H * p.Dv * format.size, executor)),
        asking(Target::kPortable      ? Asking::into_l1
               : Target::kDirectTiles ? Asking::into_l2
                                      : asking_for(p, format.size, p.group() * units.longest_q() <= kRows)),
        products(direct_products<Target>(p.dtype, asking)),
        addend(p),
        heads(heads_together(executor.num_threads)),
        lanes(count_in_lanes()),
        pairs(lanes < p.B && takes_pairs(p, approach, kMostPairedFeatures<Target>)),
        tiles(tiles_for(executor.num_threads)),
        alone(how == Approach::packed && can_pack_alone(executor.num_threads)),
        packed(p, format, keys_to_hold(), !(alone && has_window() && asks_ahead<Target>()), pairs),
        q_stride(Target::kParts * round_up(p.D, kWidth)),
        o_stride(round_up(p.Dv, kWidth)),
        query_blocks(ceil_div(units.longest_q() * heads, tiles.queries)),
        crowded(executor.num_threads >= kManyThreads && !Units::quick_to_allocate(p.Tq * p.H * p.Dv * format.size)) {}

  // Fewer when there would be too few tasks for the threads, since a row's result does not depend on its neighbours.
  index_t heads_together(int threads) const {
    if (approach == Approach::packed) return 1;
    constexpr index_t kLeastRows = 16;
    const index_t queries = max_of<index_t>(1, units.longest_q());
    const index_t ranges = units.count() * ceil_div(units.longest_k(), kInPlaceKeys);
    index_t most = max_of<index_t>(1, min_of(p.group(), kRowsTogether / queries));
    while (approach == Approach::in_place && most / 2 * queries >= kLeastRows &&
           ranges * ceil_div(p.group(), most) < index_t(threads))
      most /= 2;
    return most;
  }

  // Rows of a block that is not packed for others: all that meet keys together, or fewer queries of a head where there
  // would be too few tasks for the threads.
  index_t rows_of_block(int threads) const {
    const index_t least = max_of<index_t>(16, row_multiple()), blocks = units.count() * ceil_div(p.group(), heads);
    index_t queries = max_of<index_t>(1, units.longest_q());
    while (approach == Approach::in_place && heads == 1 && queries > least &&
           blocks * ceil_div(units.longest_q(), queries) * ceil_div(units.longest_k(), kInPlaceKeys) < index_t(threads))
      queries = round_up(ceil_div(queries, index_t(2)), row_multiple());
    return heads * queries;
  }

  // Keys of a range that is merged with others, of a sequence of so many.
  index_t range_keys(index_t keys) const {
    return approach == Approach::direct ? direct_range_keys(p, keys) : kInPlaceKeys;
  }

  Tiles tiles_for(int threads) const {
    Tiles t = forward_tiles(approach, p.D, p.Dv, Target::kSize, kRows, sees_first_keys(p));
    if (approach == Approach::packed && has_window()) t.keys = max_of(t.keys, keys_of_window());
    if (approach != Approach::direct)  // Direct loops know kDirectKeys.
      t.keys = min_of(t.keys, round_up(max_of<index_t>(units.longest_k(), 1), kKeyAlign));
    if (approach != Approach::packed) return {rows_of_block(threads), t.keys};
    // Smaller blocks, since a row's result does not depend on its neighbours: where rows lie so far apart that those of
    // a block, which a window's tasks ask for into L2 (forward_ahead.h), share too few of its sets; and when there
    // would be too few tasks for the threads.
    constexpr index_t kLeastAsked = 32, kMostApart = index_t(128) << 10;
    while (asks_ahead<Target>() && has_window() && t.queries > kLeastAsked &&
           t.queries * p.q.row_stride * format.size > kMostApart)
      t.queries /= 2;
    while (t.queries > max_of<index_t>(16, row_multiple()) &&
           units.count() * p.group() * ceil_div(units.longest_q(), t.queries) < 4 * index_t(threads))
      t.queries /= 2;
    return t;
  }

  index_t keys_to_hold() const {
    if (approach != Approach::packed) return tiles.keys;
    return alone ? most_seen() : all_keys();
  }
  index_t all_keys() const { return round_up(units.longest_k(), kKeyAlign); }
  // Whether queries of a sequence are in the lanes.
  bool in_lanes(const Sequence& sequence) const {
    const Tiles whole = forward_tiles(approach, p.D, p.Dv, Target::kSize, kRows, sees_first_keys(p));
    return !f.s_dmask && takes_lanes(p, sequence, approach, whole, Lanes<Target>::kMostDepth, sizeof(Elem));
  }
  index_t count_in_lanes() const {
    index_t count = 0;
    for (index_t b = 0; b < p.B; ++b) count += in_lanes(p.sequence(b)) ? 1 : 0;
    return count;
  }
  // Blocks are whole multiples of that many rows, the last one padded.
  index_t row_multiple() const {
    if (Target::kDirectTiles) return kTileRows;
    if (lanes > 0) return Lanes<Target>::kQueries;
    return pairs ? Target::Simd::W : kRows;
  }
  index_t rows_held() const { return round_up(tiles.queries, row_multiple()); }
  bool has_window() const { return p.window_left >= 0 && p.window_right >= 0; }
  // A key block that holds all that kNeighbours queries see, so that their strips meet one; 0 if that is too much
  // for a strip or for L2.
  index_t keys_of_window() const {
    constexpr index_t kMostBytes = index_t(768) << 10;
    const index_t keys = round_up(p.window_left + p.window_right + kNeighbours + kKeyAlign - 1, kKeyAlign);
    return keys <= most_strip_keys(kRows) && keys * (p.D + p.Dv) * Target::kSize <= kMostBytes ? keys : 0;
  }
  // Keys that a block of queries sees; fewer than all only as whole parts, wherever in a part they begin, and, unless
  // all queries are in the lanes, whose sums end elsewhere, as whole sums (gemm.h): where packed keys turn, which
  // depends on the number of threads, changes no bit of a result.
  index_t most_seen() const {
    constexpr index_t kOfSum = kStepsPerSum<Target> * Target::Format::kStep, kWhole = max_of(kPackedKeys, kOfSum);
    static_assert(kWhole % kPackedKeys == 0 && kWhole % kOfSum == 0);
    if (!has_window()) return all_keys();
    const index_t keys = p.window_left + p.window_right + tiles.queries;
    const index_t parts = (ceil_div(keys - 1, kPackedKeys) + 1) * kPackedKeys;
    return min_of(all_keys(), lanes == p.B ? parts : round_up(parts, kWhole));
  }
  // Whether workers pack for themselves what they need, although others need it too. With units of their own they need
  // little under a window; who helps with another's unit then packs all that it sees of it: too much without a window.
  // With fewer units than threads, several of which work on each, waiting for what another packs and fetching it from
  // its cache takes longer, but with two or three threads.
  bool can_pack_alone(index_t threads) const {
    constexpr index_t kMostKeys = 4096;
    const PackedKeys<Target> seen(p, format, most_seen(), false, pairs);
    const bool pays =
        units.count() >= threads ? most_seen() < all_keys() : threads >= kManyThreads && all_keys() <= kMostKeys;
    return pays && Units::quick_to_allocate(threads * seen.block_elems() * index_t(sizeof(Elem)));
  }

  // The block of packed keys' queries whose turn is nth: from the first to the last where workers pack for themselves,
  // from the last to the first where they share. Many threads, each at another head, go through the same rows at the
  // same pace: those of a large output are in fresh pages, and each thread would make the same ones
  // (docs/cpu-products.md). There each key head begins elsewhere.
  index_t block_in_turn(const Sequence& sequence, index_t hk, index_t nth) const {
    const index_t blocks = blocks_of(sequence), n = (nth + (crowded ? hk * blocks / p.Hk : 0)) % blocks;
    return alone ? n : blocks - 1 - n;
  }
  index_t blocks_of(const Sequence& sequence) const { return ceil_div(sequence.q_len, tiles.queries); }

  // With room for `slots` blocks.
  ForwardScratch<Target> carve(char* base, index_t slots) const {
    Carver c(base);
    ForwardScratch<Target> s{};
    const index_t queries = slots * rows_held();
    const bool direct = approach == Approach::direct;
    s.block = c.take<ForwardBlock<Target>>(slots);
    s.rules = c.take<ScoreRule<Real>>(slots * heads);
    s.rows = c.take<Elem>(queries * q_stride);
    s.o = c.take<Real>(queries * o_stride);
    s.state = c.take<SoftmaxState<Real>>(queries);
    if (pairs) s.pairs = PairSums<Target>::at(c.take<Elem>(PairSums<Target>::elems(queries)), queries);
    const index_t direct_staging = Target::kDirectTiles ? rows_held() * q_stride : 0;
    s.staging = c.take<Elem>(direct ? direct_staging : packed.staging_elems());
    s.packed = c.take<Elem>(alone || approach == Approach::in_place ? packed.block_elems() : 0);
    s.parts = c.take<index_t>(alone ? packed.parts() : 0);
    s.stream = c.take<const void*>(direct ? 2 * kDirectKeys + kRowsAhead : 0);
    const index_t scores = (direct ? queries : kRows) * score_stride();
    s.scores = c.take<Real>(scores);
    const index_t probabilities = Target::kTiled ? kRows * ProbabilityPitch<Target>() * Target::kParts : scores;
    s.probabilities = kInPlace ? reinterpret_cast<Elem*>(s.scores) : c.take<Elem>(probabilities);
    s.columns = c.take<Columns>(direct ? slots * ceil_div(rows_held(), kRows) : 0);
    s.sums = c.take<Real>(direct ? queries * sums_stride<Target>(p.Dv) : 0);
    s.dropout = c.take<std::uint8_t>(Target::kTiled ? kRows * kKeyAlign / 8 : kRowsAbreast<Target> * dropout_stride());
    s.addend = c.take<Real>(addend.given() ? tiles.keys : 0);
    if (lanes > 0) s.lanes = Lanes<Target>::carve(c, packed.depth(), o_stride);
    s.bytes = c.used();
    return s;
  }

  // What scores in pairs take of the rows of a block, padded with zeros.
  void sum_pairs(index_t rows, const ForwardScratch<Target>& s) const {
    if constexpr (kHasPairs<Target>)
      if (pairs) s.pairs.sum_rows(s.rows, q_stride, round_up(rows, Target::Simd::W), packed.depth());
  }

  // The part of a scratch that belongs to block `slot`.
  ForwardScratch<Target> slot(ForwardScratch<Target> s, index_t slot) const {
    const index_t queries = slot * rows_held();
    s.block += slot;
    s.rules += slot * heads;
    s.rows += queries * q_stride;
    s.o += queries * o_stride;
    s.state += queries;
    if (approach == Approach::direct) {
      s.scores += queries * kDirectKeys;
      s.probabilities += queries * kDirectKeys;
      s.columns += slot * ceil_div(rows_held(), kRows);
      s.sums += queries * sums_stride<Target>(p.Dv);
    }
    return s;
  }

  ForwardPartial<Target> carve_partial(char* base) const {
    Carver c(base);
    ForwardPartial<Target> part{};
    part.o = c.take<Real>(tiles.queries * o_stride);
    part.state = c.take<SoftmaxState<Real>>(tiles.queries);
    part.bytes = c.used();
    return part;
  }

  // From a row of scores, or probabilities, to the next.
  FA_INLINE index_t score_stride() const { return approach == Approach::direct ? kDirectKeys : ScorePitch<Target>(); }
  FA_INLINE index_t dropout_stride() const { return round_up(tiles.keys, 256) / 8; }  // bytes

  // Keys of the block that begins at key `origin`; none or fewer past the end of a sequence.
  FA_INLINE index_t keys_of(const Sequence& sequence, index_t origin) const {
    return min_of(tiles.keys, sequence.k_len - origin);
  }

  // K and V as they are packed for a block of rows: a block of keys, or what there is room for of a sequence.
  FA_INLINE Panels<Target> k(const ForwardBlock<Target>& block, const Columns& c) const {
    return packed.k(block.packed, packed_keys(block, c));
  }
  FA_INLINE Panels<Target> v(const ForwardBlock<Target>& block, const Columns& c) const {
    return packed.v(block.packed, packed_keys(block, c));
  }
  FA_INLINE index_t packed_keys(const ForwardBlock<Target>& block, const Columns& c) const {
    return approach == Approach::packed ? packed.held(block.sequence.k_len) : c.keys;
  }
  // Calls run(part, at) for the parts of `columns`, of which the first is key `origin`, whose packed keys lie one after
  // another: column n is packed key at + n.
  template <class Run>
  FA_INLINE void each_run(const ForwardBlock<Target>& block, index_t origin, Range columns, const Run& run) const {
    if (approach != Approach::packed) return run(columns, index_t(0));
    const index_t front = block.front - origin;
    for (index_t n = columns.begin; n < columns.end;) {
      const index_t end = n < front ? min_of(front, columns.end) : columns.end;
      run(Range{n, end}, n < front ? packed.keys() - front : -front);
      n = end;
    }
  }

  // Whether the mask hides the key block at key `origin` from all rows.
  bool hidden(const ForwardBlock<Target>& block, index_t origin) const {
    if (!block.rules[0].mask.given()) return false;
    const Range keys{origin, origin + keys_of(block.sequence, origin)};
    const Range queries{block.first, block.query(block.rows - 1) + 1};
    for (index_t n = 0; n < block.heads; ++n)
      if (block.rules[n].cover(queries, keys) != Cover::none) return false;
    return true;
  }

  // Where packed key blocks begin for a block of rows: with what the first of its neighbours up to a multiple of
  // kNeighbours see, whatever part of those the block holds. Rows of a window then meet one or two blocks.
  FA_INLINE index_t first_key(const ForwardBlock<Target>& block) const {
    const index_t begin = block.first / kNeighbours * kNeighbours;
    const index_t end = min_of(begin + kNeighbours, block.sequence.q_len);
    return block.rules[0].visible_keys(Range{begin, end}).begin / kKeyAlign * kKeyAlign;
  }

  const ForwardProblem& f;
  const Problem& p;
  const Approach approach;
  const Units& units;
  const RowFormat<Target> format;
  const typename RowFormat<Target>::StoreRows store_out;
  const Asking asking;  // Of direct products.
  const DirectProducts<Target> products;
  const Addend<Target> addend;
  const index_t heads;  // Most query heads whose rows share a block.
  const index_t lanes;  // Sequences whose queries are there.
  const bool pairs;     // Strips compute scores in pairs, as far as they may (ForwardStrips::in_pairs).
  const Tiles tiles;
  // Whether workers pack for themselves what they need of K and V (can_pack_alone); under a window, packed keys go
  // around. Query blocks then have their turn from first to last, and the first block of a unit sees few keys.
  // Otherwise late ones, which see most keys under a causal mask, go first, so that no thread ends on a long one.
  const bool alone;
  const PackedKeys<Target> packed;
  const index_t q_stride, o_stride;
  const index_t query_blocks;
  const bool crowded;  // Many threads meet in fresh pages.
};

}  // namespace flash_attn::cpu
