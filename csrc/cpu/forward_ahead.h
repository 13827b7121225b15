// What a task of packed keys asks for while it computes: the rows of its own output, and what the next task will load.
//
// Tasks of a worker go through the query blocks of a unit from last to first, each with the heads of the group in turn.
// Under a window, a block needs a few keys more than the one before. The last blocks of a unit need none, and ask for
// those of the next unit's first block.
#pragma once

#include "cpu/forward_block.h"

namespace flash_attn::cpu {

template <class Target>
class ForwardAhead {
  using Real = typename Target::Real;
  using Block = ForwardBlock<Target>;
  // Bytes of K and V of another unit that L2 has room for, beside what is in work (1 MB on processors that ask).
  static constexpr index_t kMostBytes = index_t(384) << 10;

 public:
  explicit ForwardAhead(const ForwardPlan<Target>& plan) : plan_(plan), p_(plan.p) {}

  NextRows of(const Block& block, index_t unit) const {
    NextRows next{};
    if (block.rows == 0) return next;
    const Sequence& sequence = block.sequence;
    add(next, block, plan_.f.out, block.b, sequence.q_begin + block.first, block.h, p_.Dv, block.rows);
    const index_t hk = block.h / p_.group(), last_h = (hk + 1) * p_.group() - 1;
    if (block.h < last_h) {
      add(next, block, p_.q, block.b, sequence.q_begin + block.first, block.h + 1, p_.D, block.rows);
      return next;
    }
    if (block.first > 0) {
      const index_t first = block.first - plan_.tiles.queries;
      add(next, block, p_.q, block.b, sequence.q_begin + first, hk * p_.group(), p_.D, plan_.tiles.queries);
      const Range fresh{begin_packed(block.rules[0].visible_keys(Range{first, block.first})), begin_packed(block.keys)};
      add_keys(next, block, block.b, hk, sequence, fresh);
      if (!fresh.empty()) return next;
    }
    if (unit + 1 < plan_.units.count()) add_unit(next, block, plan_.units.b(unit + 1), plan_.units.hk(unit + 1));
    return next;
  }

 private:
  static index_t begin_packed(Range keys) { return keys.begin / kPackedKeys * kPackedKeys; }

  // A part of what the first task of another unit needs, the last part with the last block of this one.
  void add_unit(NextRows& next, const Block& block, index_t b, index_t hk) const {
    const index_t queries = plan_.tiles.queries, h = hk * p_.group();
    const Sequence sequence = p_.sequence(b);
    if (sequence.q_len == 0) return;
    const Range seen{(sequence.q_len - 1) / queries * queries, sequence.q_len};
    if (block.first == 0) add(next, block, p_.q, b, sequence.q_begin + seen.begin, h, p_.D, seen.end - seen.begin);
    Range keys = p_.template score_rule<Real>(b, h).visible_keys(seen);
    keys.begin = begin_packed(keys);
    if ((keys.end - keys.begin) * (p_.D + p_.Dv) * plan_.format.size > kMostBytes) return;
    const index_t end = round_up(keys.end, queries) - block.first;
    add_keys(next, block, b, hk, sequence, {max_of(end - queries, keys.begin), min_of(end, keys.end)});
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
};

}  // namespace flash_attn::cpu
