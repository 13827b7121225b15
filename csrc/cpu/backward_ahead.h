// What the strips of a backward task ask for while they compute: the rows that the next query block or the next key
// block loads.
//
// A whole panel of S^T or dP^T asks for a few rows. Between strips of 8 keys L2 has room for that; those of 4 keys read
// twice as much from it, and lost by it what their blocks gained (docs/cpu-backward.md).
#pragma once

#include "cpu/backward_walk.h"
#include "cpu/rows_ahead.h"

namespace flash_attn::cpu {

// What watches products (gemm.h) to ask.
class PanelAsks {
 public:
  FA_INLINE explicit PanelAsks(RowsInTurn& rows) : rows_(&rows) {}

  FA_INLINE void begin_panel() {
    constexpr int kOfPanel = 2;
    for (int n = 0; n < kOfPanel; ++n) rows_->ask();
  }
  template <class V>
  FA_INLINE void operator()(int, V) const {}

 private:
  RowsInTurn* rows_;  // Not a reference: watches are copied and assigned.
};

// Of one task, whose chunks are a query block each.
template <class Target>
class BackwardAhead {
  using Walk = BackwardWalk<Target>;
  using Rows = typename Walk::Rows;
  using Keys = typename Walk::Keys;

 public:
  BackwardAhead(const BackwardPlan<Target>& plan, const Walk& walk, const BackwardProblem& backward, const Keys& keys,
                RowsInTurn& asks)
      : plan_(plan), walk_(walk), f_(backward), p_(backward.problem), k_(keys), asks_(asks) {
    asks_.clear();
  }

  void before_chunk(index_t c) {
    if (c < next_) return;
    asks_.clear();
    next_ = c + 1;
    if (add_first_packed(k_, next_)) return;
    Keys then = walk_.keys_of(k_.unit, k_.index + 1);
    if (then.keys.empty() && k_.unit + 1 < plan_.units.count()) then = walk_.keys_of(k_.unit + 1, 0);
    if (then.keys.empty()) return;
    index_t first = 0;
    add_first_packed(then, first);
    add(p_.k, then, p_.D), add(p_.v, then, p_.Dv);
  }

 private:
  // The first query block from a chunk on that no key block before has met; becomes its chunk, whether there is one.
  bool add_first_packed(const Keys& k, index_t& chunk) {
    for (; chunk < k.chunks; ++chunk) {
      Rows r{};
      const bool found = walk_.any_of_chunk(k, chunk, [&](index_t head, index_t block) {
        return walk_.sees(k, head, block, r) && walk_.key_blocks_of(r).begin == k.index;
      });
      if (!found) continue;
      add(f_.dout, r, p_.Dv), add(f_.out, r, p_.Dv), add(p_.q, r, p_.D);
      return true;
    }
    return false;
  }

  void add(const Operand& x, const Rows& r, index_t features) {
    add(x, r.b, r.sequence.q_begin + r.first, r.h, r.count, features);
  }
  void add(const Operand& x, const Keys& k, index_t features) {
    add(x, plan_.units.b(k.unit), k.sequence.k_begin + k.keys.begin, k.hk, k.keys.end - k.keys.begin, features);
  }
  void add(const Operand& x, index_t b, index_t row, index_t h, index_t count, index_t features) {
    const index_t size = size_of(p_.dtype);
    asks_.add({row_at(x, size, b, row, h), x.row_stride * size, features * size, count, 0});
  }

  const BackwardPlan<Target>& plan_;
  const Walk& walk_;
  const BackwardProblem& f_;
  const Problem& p_;
  const Keys& k_;
  RowsInTurn& asks_;
  index_t next_ = 0;  // The chunk whose query block is asked for.
};

}  // namespace flash_attn::cpu
