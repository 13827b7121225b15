// What a task of packed keys asks for while it computes: the rows of its own output, and what the next task will load.
//
// Tasks of a worker go through the query blocks of a unit in turn, each with the heads of the group. Where packed keys
// go around, a block needs a few keys more than the one before. Where they do not, the first block of a unit needs
// nearly all of them, and the last blocks of the unit before ask for these.
#pragma once

#include "cpu/forward_block.h"

namespace flash_attn::cpu {

template <class Target>
class ForwardAhead {
  using Real = typename Target::Real;
  using Block = ForwardBlock<Target>;
  // Blocks that ask for keys of another unit: fewer, and its last rows are asked for in haste; more, and its first rows
  // have left the cache again.
  static constexpr index_t kLastBlocks = 4;
  // Bytes of K and V of another unit that L2 has room for, beside what is in work (1 MB on processors that ask).
  static constexpr index_t kMostBytes = index_t(384) << 10;

 public:
  explicit ForwardAhead(const ForwardPlan<Target>& plan) : plan_(plan), p_(plan.p) {}

  NextRows of(const Block& block, index_t unit) const {
    NextRows next{};
    next.into_l2 = into_l2_;
    const Sequence& sequence = block.sequence;
    // Rows that go past the caches are not to be fetched into them.
    if (plan_.store_out == plan_.format.store_rows)
      add(next, block, plan_.f.out, block.b, sequence.q_begin + block.first, block.h, p_.Dv, block.rows);
    const index_t hk = block.h / p_.group(), last_h = (hk + 1) * p_.group() - 1;
    if (block.h < last_h) {
      add(next, block, p_.q, block.b, sequence.q_begin + block.first, block.h + 1, p_.D, block.rows);
      return next;
    }
    const index_t blocks = plan_.blocks_of(sequence), left = blocks - 1 - block.nth;
    if (left > 0) {
      const Range rows = rows_of(sequence, hk, block.nth + 1);
      add(next, block, p_.q, block.b, sequence.q_begin + rows.begin, hk * p_.group(), p_.D, rows.end - rows.begin);
      const Range seen = block.rules[0].visible_keys(rows);
      const Range fresh = plan_.alone ? Range{end_packed(sequence, block.keys), end_packed(sequence, seen)}
                                      : Range{begin_packed(seen), begin_packed(block.keys)};
      add_keys(next, block, block.b, hk, sequence, fresh);
      if (!fresh.empty()) return next;
    }
    const index_t parts = plan_.alone ? 1 : min_of(kLastBlocks, blocks);
    if (left < parts && unit + 1 < plan_.units.count())
      add_unit(next, block, plan_.units.b(unit + 1), plan_.units.hk(unit + 1), parts - 1 - left, parts);
    return next;
  }

 private:
  // Parts are packed as a whole.
  static index_t begin_packed(Range keys) { return keys.begin / kPackedKeys * kPackedKeys; }
  static index_t end_packed(const Sequence& sequence, Range keys) {
    return min_of(round_up(keys.end, kPackedKeys), sequence.k_len);
  }
  // Of the query block whose turn is nth.
  Range rows_of(const Sequence& sequence, index_t hk, index_t nth) const {
    const index_t first = plan_.block_in_turn(sequence, hk, nth) * plan_.tiles.queries;
    return {first, min_of(first + plan_.tiles.queries, sequence.q_len)};
  }

  // A part of what the first task of another unit needs, the last part with the last block of this one.
  void add_unit(NextRows& next, const Block& block, index_t b, index_t hk, index_t part, index_t parts) const {
    const Sequence sequence = p_.sequence(b);
    if (sequence.q_len == 0) return;
    const index_t h = hk * p_.group();
    const Range rows = rows_of(sequence, hk, 0);
    if (part == parts - 1) add(next, block, p_.q, b, sequence.q_begin + rows.begin, h, p_.D, rows.end - rows.begin);
    Range keys = p_.template score_rule<Real>(b, h).visible_keys(rows);
    keys = {begin_packed(keys), end_packed(sequence, keys)};
    if ((keys.end - keys.begin) * (p_.D + p_.Dv) * plan_.format.size > kMostBytes) return;
    const index_t share = ceil_div(keys.end - keys.begin, parts), begin = keys.begin + part * share;
    add_keys(next, block, b, hk, sequence, {begin, min_of(begin + share, keys.end)});
  }

  // As far as they are rows of one operand, not across pages.
  void add_keys(NextRows& next, const Block& block, index_t b, index_t hk, const Sequence& sequence, Range keys) const {
    if (keys.empty()) return;
    const KeyRun run = p_.keys_from(sequence, b, keys.begin);
    const index_t count = min_of(run.count, keys.end - keys.begin);
    add(next, block, p_.k, run.batch, run.row, hk, p_.D, count);
    add(next, block, p_.v, run.batch, run.row, hk, p_.Dv, count);
  }

  void add(NextRows& next, const Block& block, const Operand& x, index_t b, index_t row, index_t h, index_t features,
           index_t count) const {
    const index_t size = plan_.format.size, share = ceil_div(count * Target::kRows, block.rows);
    next.add({row_at(x, size, b, row, h), x.row_stride * size, features * size, count, share});
  }

  const ForwardPlan<Target>& plan_;
  const Problem& p_;
  const bool into_l2_ = prefetches_into_l2();
};

}  // namespace flash_attn::cpu
