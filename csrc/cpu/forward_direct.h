// Few rows against keys and values where they are in memory, as in decoding.
//
// That is a matter of reading memory, which goes fastest in the memory's order: the key heads of a task, neighbours
// there, meet a few keys after another side by side, first as K, then as V.
#pragma once

#include "cpu/direct_tiles.h"
#include "cpu/forward_strips.h"

namespace flash_attn::cpu {

template <class Target>
class ForwardDirect {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Block = ForwardBlock<Target>;
  using Scratch = ForwardScratch<Target>;
  static constexpr index_t kRows = Target::kRows;
  // Rows that all heads of a task meet before the next ones, in all or, where they are read from L2, in bytes. Twice as
  // many bytes where sums cost more, of elements that are converted for no more than kFewKeys (docs/cpu-decoding.md).
  // More in tiles, whose sums cost most (docs/cpu-amx.md).
  static constexpr index_t kRowsOfAll = 64, kBytesOfAll = Target::kDirectTiles ? 128 << 10 : 32 << 10, kFewKeys = 32;
  static constexpr index_t kLeastRows = Target::kDirectTiles ? kTileRows : 8;
  static constexpr bool kShortVectors = Target::Simd::W < 16;
  static constexpr index_t kPageBytes = 4096;  // Of address translation.

 public:
  ForwardDirect(const ForwardPlan<Target>& plan, const ForwardStrips<Target>& strips)
      : plan_(plan),
        p_(plan.p),
        strips_(strips),
        into_l2_(goes_into_l2(plan.asking)),
        rows_per_page_(max_of<index_t>(1, kPageBytes / max_of<index_t>(1, p_.k.row_stride * plan.format.size))) {}

  // The rows of `count` neighbouring key heads of a sequence against key blocks from key keys.begin to keys.end, as far
  // as they see any. Scratch is that of the first.
  void attend(index_t count, Range keys, const Scratch& s) const {
    if (s.block->rows == 0) return;
    [[maybe_unused]] const typename Target::Tiles::Session session(min_of(s.block->rows, kTileRows));
    for (index_t origin = keys.begin; origin < keys.end; origin += kDirectKeys) {
      const Range seen = find_columns(count, origin, s);
      if (seen.empty()) continue;
      const Stream stream = find_rows(*s.block, origin, seen, origin + kDirectKeys < keys.end, s);
      multiply_keys(count, seen, stream, s);
      for (index_t i = 0; i < count; ++i) {
        ask_between(stream, seen, i, count);
        weigh(origin, plan_.slot(s, i));
      }
      multiply_values(count, seen, stream, s);
    }
  }

 private:
  // Addresses of rows, of the first head, in the order of their use: keys and values of the columns `seen` of a block,
  // then the first keys of the next block.
  struct Stream {
    const void* const* rows;
    index_t values;  // Column n is row n for K, row values + n for V.
    index_t next;    // Row of the next block's first key.
  };

  // Sets the columns of each strip; returns what any of them sees.
  Range find_columns(index_t count, index_t origin, const Scratch& scratch) const {
    Range seen{kDirectKeys, 0};
    for (index_t i = 0; i < count; ++i) {
      const Scratch s = plan_.slot(scratch, i);
      const bool hidden = origin >= s.block->keys.end || plan_.hidden(*s.block, origin);
      for (index_t r = 0; r < s.block->rows; r += kRows) {
        Columns& c = s.columns[r / kRows];
        if (hidden || !strips_.scores().columns(*s.block, origin, {r, min_of(r + kRows, s.block->rows)}, c)) {
          c = {};
          continue;
        }
        seen = {min_of(seen.begin, c.begin), max_of(seen.end, min_of(c.end, c.keys))};
      }
    }
    return seen;
  }

  Stream find_rows(const Block& block, index_t origin, Range seen, bool more, const Scratch& s) const {
    const index_t values = seen.end - seen.begin, next = seen.end + values;
    addresses(block, {origin + seen.begin, origin + seen.end}, s.stream + seen.begin, s.stream + seen.end);
    const index_t after = origin + kDirectKeys;
    const index_t ahead = more ? max_of<index_t>(0, min_of(kRowsAhead, block.sequence.k_len - after)) : 0;
    addresses(block, {after, after + ahead}, s.stream + next, nullptr);
    for (index_t n = ahead; n < kRowsAhead; ++n) s.stream[next + n] = s.stream[next - 1];
    return {s.stream, values, next};
  }

  // Of K and, if asked for, of V.
  void addresses(const Block& block, Range keys, const void** k, const void** v) const {
    const index_t head = block.h / p_.group();
    const Rows of_k(p_.k, plan_.format.size, head), of_v(p_.v, plan_.format.size, head);
    p_.each_run(block.sequence, block.b, keys, [&](const KeyRun& run, index_t first) {
      of_k.put(run, k + (first - keys.begin));
      if (v) of_v.put(run, v + (first - keys.begin));
    });
  }

  // Addresses of a head's rows.
  struct Rows {
    const char* data;
    index_t batch_bytes, row_bytes;

    Rows(const Operand& x, index_t size, index_t head)
        : data(row_at(x, size, 0, 0, head)), batch_bytes(x.batch_stride * size), row_bytes(x.row_stride * size) {}
    FA_INLINE void put(const KeyRun& run, const void** to) const {
      const char* row = data + run.batch * batch_bytes + run.row * row_bytes;
      *to = row;
      if (run.count == 1) return;  // Pages of one key, some servers' default: no vector of addresses is set up.
      for (index_t n = 1; n < run.count; ++n) to[n] = row + n * row_bytes;
    }
  };

  // Keys that `count` heads meet before the next ones. Few, so that what is read and asked for is in the order of
  // memory; but each time the sums of a head are loaded and stored, so that there are more where memory goes to L2, not
  // to L1.
  FA_INLINE index_t tile_of(index_t count) const {
    if (!into_l2_) return max_of<index_t>(kLeastRows, kRowsOfAll / count / 8 * 8);
    const index_t size = plan_.format.size, bytes = max_of(p_.D, p_.Dv) * size * count;
    // A tile's sums are more vectors than its rows where vectors are short or elements are converted to longer ones.
    const index_t twice = kShortVectors ? kDirectKeys : size < index_t(sizeof(typename Target::Elem)) ? kFewKeys : 0;
    index_t tile = kDirectKeys;
    while (tile > kLeastRows && tile * bytes > (tile <= twice ? 2 : 1) * kBytesOfAll) tile /= 2;
    return tile;
  }

  // Asks far ahead for share `i` of `count` of the pages of memory that the heads need in a tile, a line of each: when
  // pages are in random order, translating their addresses takes longer than reading them.
  FA_INLINE void ask_for_pages(const Stream& stream, index_t row, index_t i, index_t count) const {
    const index_t tile = tile_of(count), first = tile * i / count, last = max_of(first + 1, tile * (i + 1) / count);
    const void* const* const far = stream.rows + row + kDirectKeys - tile;
    for (index_t n = round_up(first, rows_per_page_); n < last; n += rows_per_page_) FA_PREFETCH(far[n]);
  }

  // Whether heads ask for shares of rows in the order of memory, where they are neighbours, and not each for rows of
  // its own, as it does into L1 and not from memory.
  FA_INLINE bool asks_in_shares(const Operand& x, index_t features) const {
    return plan_.asking != Asking::into_l1 && x.head_stride == features &&
           features * plan_.format.size % kCacheLine == 0;
  }

  // What head `i` of `count` asks for while it reads stream rows `begin` to `end` of x: rows of its own behind `end`,
  // or its share of as many, but those that are `asked` for already. A guess where K's rows are followed by V's with
  // other strides.
  FA_INLINE RowsToAsk ahead_of(const Stream& stream, Range rows, index_t asked, index_t i, index_t count,
                               const Operand& x, index_t features) const {
    const index_t size = plan_.format.size;
    if (!asks_in_shares(x, features)) return {stream.rows + rows.end, i * x.head_stride * size, features * size};
    const index_t left = max_of<index_t>(0, rows.end - rows.begin - asked);
    return share_of_rows(stream.rows + rows.end + asked, left, i, count, features * size);
  }

  // Rows behind V's first tile that are asked for before it: nothing else would read memory while weights are made. A
  // Xeon gained nothing.
  FA_INLINE index_t asked_between() const {
    return into_l2_ && asks_between_products() && asks_in_shares(p_.v, p_.Dv) ? kRowsBetween : 0;
  }
  // Share `i` of `count` of these, not at the pace of LinesAhead, which is that of products (docs/cpu-zen4.md).
  FA_INLINE void ask_between(const Stream& stream, Range seen, index_t i, index_t count) const {
    const index_t bytes = p_.Dv * plan_.format.size, tile = tile_of(count);
    const index_t end = min_of(seen.begin / tile * tile + tile, seen.end);
    const RowsToAsk share = share_of_rows(stream.rows + stream.values + end, asked_between(), i, count, bytes);
    const void* const* row = share.first;
    index_t skipped = share.skipped;
    for (index_t left = asked_between() * bytes; left > 0; ++row, skipped = 0) {
      const index_t part = min_of(left, share.bytes - skipped);
      prefetch_row<IntoL2>(static_cast<const char*>(*row) + skipped, part);
      left -= part;
    }
  }

  // product(s, r, columns, rows) for each strip r of each head, a tile of columns at a time; column n is row first + n.
  template <class Product>
  FA_INLINE void walk(index_t count, Range seen, const Stream& stream, index_t first, const Scratch& scratch,
                      const Product& product) const {
    const Operand& x = first > 0 ? p_.v : p_.k;
    const index_t tile = tile_of(count), features = first > 0 ? p_.Dv : p_.D;
    for (index_t n = seen.begin / tile * tile; n < seen.end; n += tile)
      for (index_t i = 0; i < count; ++i) {
        const Scratch s = plan_.slot(scratch, i);
        const Range rows{first + max_of(n, seen.begin), first + min_of(n + tile, seen.end)};
        if (plan_.asking == Asking::into_l1) ask_for_pages(stream, rows.begin, i, count);
        const index_t asked = first > 0 && n <= seen.begin ? asked_between() : 0;
        const RowsToAsk ahead = ahead_of(stream, rows, asked, i, count, x, features);
        for (index_t r = 0; r < s.block->rows; r += kRows) {
          const Columns& c = s.columns[r / kRows];
          const Range columns{max_of(n, c.begin), min_of(n + tile, min_of(c.end, c.keys))};
          if (!columns.empty()) product(s, r, columns, DirectRows{stream.rows + first, i * x.head_stride, ahead});
        }
      }
  }

  FA_INLINE const typename DirectProducts<Target>::OfRows& products(const Scratch& s, index_t r) const {
    return plan_.products.of(s.block->rows - r);
  }

  void multiply_keys(index_t count, Range seen, const Stream& stream, const Scratch& scratch) const {
    walk(count, seen, stream, 0, scratch, [&](const Scratch& s, index_t r, Range columns, const DirectRows& rows) {
      const Elem* const q = s.rows + r * plan_.q_stride;
      if constexpr (Target::kDirectTiles)
        DirectTiles<Target>::multiply_keys(s.block->rows, q, p_.D, rows, columns, s.scores);
      else
        products(s, r).dots(q, plan_.q_stride, p_.D, rows, columns.begin, columns.end, s.scores + r * kDirectKeys);
    });
  }

  void weigh(index_t origin, Scratch s) const {
    strips_.scores().load_shared_addend(*s.block, origin, s);
    for (index_t r = 0; r < s.block->rows; r += kRows) {
      const Columns& c = s.columns[r / kRows];
      if (c.begin < c.end) strips_.weigh(*s.block, r, c, s);
      s.scores += kRows * kDirectKeys;
      s.probabilities += kRows * kDirectKeys;
    }
  }

  void multiply_values(index_t count, Range seen, const Stream& stream, const Scratch& scratch) const {
    const index_t stride = sums_stride<Target>(p_.Dv);
    walk(count, seen, stream, stream.values, scratch,
         [&](const Scratch& s, index_t r, Range columns, const DirectRows& rows) {
           const Elem* const p = s.probabilities + r * kDirectKeys;
           const bool fresh = columns.begin == s.columns[r / kRows].begin;
           if constexpr (Target::kDirectTiles)
             DirectTiles<Target>::multiply_values(s.block->rows, p, rows, columns, p_.Dv, s.sums, fresh);
           else
             products(s, r).accumulate(p, rows, columns.begin, columns.end, p_.Dv, s.sums + r * stride, fresh);
         });
    for (index_t i = 0; i < count; ++i) {
      const Scratch s = plan_.slot(scratch, i);
      for (index_t r = 0; r < s.block->rows; r += kRows) {
        if (s.columns[r / kRows].begin >= s.columns[r / kRows].end) continue;
        if constexpr (Target::kDirectTiles)
          DirectTiles<Target>::add_sums(s.block->rows, s.sums, p_.Dv, s.o, plan_.o_stride);
        else
          products(s, r).add(s.sums + r * stride, p_.Dv, s.o + r * plan_.o_stride, plan_.o_stride);
      }
    }
  }

  const ForwardPlan<Target>& plan_;
  const Problem& p_;
  const ForwardStrips<Target>& strips_;
  const bool into_l2_;  // Where memory goes that is asked for.
  const index_t rows_per_page_;
};

}  // namespace flash_attn::cpu
