// Scores of a strip of rows: the columns of a key block that it sees, its dot products, and what features make of them.
#pragma once

#include "cpu/capped_scores.h"
#include "cpu/forward_block.h"

namespace flash_attn::cpu {

template <class Target>
class ForwardScores {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Block = ForwardBlock<Target>;
  using Scratch = ForwardScratch<Target>;
  static constexpr index_t W = Simd::W, kStep = Target::Format::kStep, kRows = Target::kRows, kWidth = Target::kWidth;
  static constexpr index_t kCut = kDepthCut<Target>;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  explicit ForwardScores(const ForwardPlan<Target>& plan)
      : plan_(plan),
        p_(plan.p),
        addend_(plan.addend),
        bounded_(plan.p.key_begin.data || plan.p.key_end.data),
        plain_(has_plain_scores(plan.p)) {}

  // The part that `rows` see of the key block at key `origin`; false if that is nothing.
  bool columns(const Block& block, index_t origin, Range rows, Columns& c) const {
    const Range seen = block.seen(rows);
    c.origin = origin;
    c.keys = plan_.keys_of(block.sequence, origin);
    const index_t begin = max_of<index_t>(seen.begin - origin, 0), end = min_of(seen.end - origin, c.keys);
    if (begin >= end) return false;
    c.begin = begin / kWidth * kWidth;
    c.end = round_up(end, kWidth);
    c.seen = {begin / kCut * kCut, round_up(end, kCut)};
    c.plain = plain_;
    c.inner = {c.begin, c.begin};
    if (!bounded_) {
      const index_t from = block.rules[0].visible_keys(block.query(rows.end - 1)).begin - origin;
      const index_t to = block.rules[0].visible_keys(block.query(rows.begin)).end - origin;
      c.inner.begin = min_of(max_of(round_up(max_of<index_t>(from, 0), W), c.begin), c.end);
      c.inner.end = max_of(min_of(to, c.end) / W * W, c.inner.begin);
    }
    return true;
  }

  // Columns [first, first + most) of c as columns of a block of their own.
  Columns part_of(const Columns& c, index_t first, index_t most) const {
    const auto part = [&](Range x) {
      const index_t begin = min_of(max_of<index_t>(x.begin - first, 0), most);
      return Range{begin, max_of(begin, min_of(x.end - first, most))};
    };
    const Range whole = part({c.begin, c.end});
    return {c.origin + first, whole.begin, whole.end, part(c.seen), c.keys - first, c.plain, part(c.inner)};
  }

  // Whether what is added to the scores of a key block is the same for all rows.
  FA_INLINE bool shares_addend(const Block& block) const { return !addend_.per_query() && block.heads == 1; }

  // What is added to the scores of all rows alike in the key block at key `origin`, once for all of its strips.
  void load_shared_addend(const Block& block, index_t origin, const Scratch& s) const {
    if (addend_.given() && shares_addend(block))
      addend_.row(block.rules[0], block.b, block.h, block.first, {},
                  {origin, origin + plan_.keys_of(block.sequence, origin)}, s.addend);
  }

  // Dot products of the rows from r on with keys of `columns`, the first of which x begins with.
  void dot_products(const Block& block, index_t r, const Columns& c, Range columns, Real* x, index_t stride) const {
    const StripA<Elem> rows = block.strip(r);
    const Panels<Target> k = plan_.k(block, c);
    plan_.each_run(block, c.origin, columns, [&](Range part, index_t at) {
      multiply_strip<Target, false>(rows, k, 0, plan_.packed.depth(), at + part.begin, at + part.end,
                                    x + (part.begin - columns.begin), stride);
    });
  }

  // What turns dot products into scores in log2 units: they are multiplied by `factor` and `top` holds their maximum,
  // lane by lane, unless nobody has looked for it yet.
  struct Scaled {
    Real factor;
    bool searched;
    V top;
  };
  // Turns dot products of query row r into scores, -inf where it sees nothing. What needs no more than a factor is not
  // touched, nor searched.
  Scaled mask_and_transform(const Block& block, index_t r, const Columns& c, Real* x, const Scratch& s) const {
    const index_t i = block.query(r);
    const ScoreRule<Real> rule = block.rule(r);  // A copy, which no store to x can change.
    if (addend_.given() && !shares_addend(block))
      addend_.row(rule, block.b, block.head(r), i, {block.heads == 1 && r + kRows < block.rows ? kRows : 0},
                  {c.origin + c.begin, c.origin + min_of(c.end, c.keys)}, s.addend + c.begin);
    const Real* const addend = addend_.given() ? s.addend : nullptr;
    const Range seen = rule.visible_keys(i);
    const index_t begin = min_of(max_of(seen.begin - c.origin, c.begin), c.end);
    const index_t end = max_of(min_of(seen.end - c.origin, c.end), begin);
    // Vectors of visible keys alone give their maximum on the way.
    const index_t inner = min_of(round_up(begin, W), c.end), inner_end = max_of(end / W * W, inner);
    const auto transform = [&](index_t from, index_t to) {
      V top = V(-kInfinity);
      V distance = V(Real(rule.diagonal(i) - c.origin - from)) - Simd::iota();
      for (index_t n = from; n < to; n += W, distance = distance - V(Real(W))) {
        V score = rule.logit_of_capped(Simd::load(x + n), distance);
        if (addend) score = score + Simd::load(addend + n);
        Simd::store(x + n, score);
        top = vmax(top, score);
      }
      return top;
    };
    // Hides what lies outside of [begin, end) in the vectors of [from, to).
    const auto hide = [&](V top, index_t from, index_t to) {
      const V hidden = V(-kInfinity);
      for (index_t n = from; n < to; n += W) {
        const V column = V(Real(n)) + Simd::iota();
        const V score = select_between(column, V(Real(begin)), V(Real(end)), Simd::load(x + n), hidden);
        Simd::store(x + n, score);
        top = vmax(top, score);
      }
      return top;
    };
    cap_scores<Target>(rule, x, {c.begin, c.end});
    const bool plain = !addend && !rule.has_alibi() && rule.factor() > Real(0);
    V top = V(-kInfinity);
    if (!plain) {
      transform(c.begin, inner);
      top = transform(inner, inner_end);
      transform(inner_end, c.end);
    }
    top = hide(hide(top, c.begin, inner), inner_end, c.end);
    return {plain ? rule.factor() : Real(1), !plain, top};
  }

 private:
  const ForwardPlan<Target>& plan_;
  const Problem& p_;
  const Addend<Target>& addend_;
  const bool bounded_;  // By bounds of rows, which may be in any order.
  const bool plain_;
};

}  // namespace flash_attn::cpu
