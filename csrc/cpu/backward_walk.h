// Which blocks of queries and keys meet in the backward pass, and in which order.
#pragma once

#include "cpu/backward_plan.h"

namespace flash_attn::cpu {

template <class Target>
class BackwardWalk {
  using Real = typename Target::Real;

 public:
  // A query block as a task sees it.
  struct Rows {
    index_t b, h, first, count;
    Sequence sequence;
    ScoreRule<Real> rule;
    Range keys;  // Seen by some of its queries.
  };
  // A key block, likewise.
  struct Keys {
    index_t unit, index, hk;
    Sequence sequence;
    Range keys;
    index_t padded;  // Keys, in whole strips.
    index_t chunks;  // Of the query blocks of its unit.
  };

  explicit BackwardWalk(const BackwardPlan<Target>& plan) : plan_(plan), p_(plan.p) {}

  // False if the unit has no such block.
  bool rows_of(index_t unit, index_t g, index_t query_block, Rows& r) const {
    r.b = plan_.units.b(unit);
    r.h = plan_.units.hk(unit) * p_.group() + g;
    r.sequence = p_.sequence(r.b);
    r.first = query_block * plan_.tiles.queries;
    if (r.first >= r.sequence.q_len) return false;
    r.count = min_of(plan_.tiles.queries, r.sequence.q_len - r.first);
    r.rule = p_.template score_rule<Real>(r.b, r.h);
    r.keys = r.rule.visible_keys(Range{r.first, r.first + r.count});
    return true;
  }
  // The key blocks that some of its queries see.
  Range key_blocks_of(const Rows& r) const {
    return {r.keys.begin / plan_.tiles.keys, ceil_div(r.keys.end, plan_.tiles.keys)};
  }

  Keys keys_of(index_t unit, index_t kb) const {
    const Sequence sequence = p_.sequence(plan_.units.b(unit));
    const Range keys{kb * plan_.tiles.keys, min_of((kb + 1) * plan_.tiles.keys, sequence.k_len)};
    return {unit,
            kb,
            plan_.units.hk(unit),
            sequence,
            keys,
            round_up(keys.end - keys.begin, index_t(Target::kRows)),
            plan_.chunks_of(sequence)};
  }

  // Whether a query block sees some of the keys.
  bool sees(const Keys& k, index_t head, index_t block, Rows& r) const {
    return rows_of(k.unit, head, block, r) && r.keys.begin < k.keys.end && r.keys.end > k.keys.begin;
  }

  // Calls work(head, block) for the query blocks of a chunk until it returns true; whether it did.
  template <class Work>
  FA_INLINE bool any_of_chunk(const Keys& k, index_t c, const Work& work) const {
    const index_t blocks = plan_.blocks_of(k.sequence);
    const Range chunk{c * blocks / k.chunks, (c + 1) * blocks / k.chunks};
    return plan_.any_in_order(chunk, blocks / p_.group(), plan_.blocks_ahead(k.sequence, k.hk), work);
  }
  bool chunk_sees(const Keys& k, index_t c) const {
    return any_of_chunk(k, c, [&](index_t head, index_t block) {
      Rows r{};
      return sees(k, head, block, r);
    });
  }

 private:
  const BackwardPlan<Target>& plan_;
  const Problem& p_;
};

}  // namespace flash_attn::cpu
