// A block of rows against its key blocks, strip by strip: scores, softmax, O += P * V.
#pragma once

#include <cstring>

#include "cpu/dropout_bits.h"
#include "cpu/forward_block.h"

namespace flash_attn::cpu {

template <class Target>
class ForwardStrips {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Format = typename Target::Format;
  using Block = ForwardBlock<Target>;
  using Scratch = ForwardScratch<Target>;
  static constexpr index_t W = Simd::W, kStep = Format::kStep, kRows = Target::kRows, kWidth = Target::kWidth;

 public:
  explicit ForwardStrips(const ForwardPlan<Target>& plan)
      : plan_(plan), f_(plan.f), p_(plan.p), addend_(plan.addend), tiles_(plan.tiles) {}

  // All rows of a block against key blocks [key_blocks.begin, key_blocks.end), as far as they see any.
  void attend(const Block& block, Range key_blocks, const Scratch& s) const {
    if (block.rows == 0 || block.keys.empty()) return;
    const index_t first = max_of(key_blocks.begin, block.keys.begin / tiles_.keys);
    const index_t last = min_of(key_blocks.end, ceil_div(block.keys.end, tiles_.keys));
    for (index_t kb = first; kb < last; ++kb) {
      if (hidden(block, kb)) continue;
      if (plan_.approach == Approach::in_place) pack_seen(block, kb, s);
      load_shared_addend(block, kb, s);
      for (index_t r = 0; r < block.rows; r += kRows) strip(block, kb, r, s);
    }
  }

  // exp(score - row maximum), negative where dropped: a second walk, now that the maxima are known.
  void write_dmask(const Block& block, const Scratch& s) const {
    for (index_t kb = 0; kb * tiles_.keys < block.keys.end; ++kb) {
      load_shared_addend(block, kb, s);
      for (index_t r = 0; r < block.rows; r += kRows) {
        const index_t rows = min_of(kRows, block.rows - r);
        Columns c{};
        if (!columns(block, kb, {r, r + rows}, c)) continue;
        scores(block, kb, r, c, s);
        for (index_t n = 0; n < rows; ++n) write_dmask_row(block, r + n, c, s.scores + n * tiles_.keys, s);
      }
    }
  }

  // Whether the mask hides a whole key block from all rows.
  bool hidden(const Block& block, index_t kb) const {
    if (!block.rules[0].mask.given()) return false;
    const Range keys{kb * tiles_.keys, kb * tiles_.keys + plan_.keys_of(block.sequence, kb)};
    const Range queries{block.first, block.query(block.rows - 1) + 1};
    for (index_t n = 0; n < block.heads; ++n)
      if (block.rules[n].cover(queries, keys) != Cover::none) return false;
    return true;
  }

  bool columns(const Block& block, index_t kb, Range rows, Columns& c) const {
    const Range seen = block.seen(rows);
    c.origin = kb * tiles_.keys;
    c.keys = plan_.keys_of(block.sequence, kb);
    const index_t begin = max_of<index_t>(seen.begin - c.origin, 0), end = min_of(seen.end - c.origin, c.keys);
    if (begin >= end) return false;
    const Panels<Target> panels = plan_.packed.k(block.packed, c.keys);
    c.first = panels.at(begin);
    c.last = panels.at(end - 1) + 1;
    c.begin = begin / kWidth * kWidth;
    c.end = round_up(end, kWidth);
    return true;
  }

  void load_shared_addend(const Block& block, index_t kb, const Scratch& s) const {
    const index_t origin = kb * tiles_.keys;
    if (addend_.given() && shares_addend(block))
      addend_.row(block.rules[0], block.b, block.h, block.first, 0,
                  {origin, origin + plan_.keys_of(block.sequence, kb)}, s.addend);
  }

  // Turns the scores of the strip at row r into probabilities, 0 in rows past the last.
  void weigh(const Block& block, index_t r, const Columns& c, const Scratch& s) const {
    for (index_t n = 0; n < kRows; ++n) {
      if (r + n < block.rows)
        softmax(block, r + n, c, s.scores + n * tiles_.keys, s.probabilities + n * tiles_.keys, s);
      else
        fill(s.probabilities + n * tiles_.keys, c.begin, c.end, Elem{});
    }
  }

 private:
  // Whether what is added to the scores of a key block is the same for all rows.
  FA_INLINE bool shares_addend(const Block& block) const { return !addend_.per_query() && block.heads == 1; }

  // The keys of a block that some row sees, as columns of the block.
  Range seen_columns(const Block& block, index_t kb) const {
    const index_t origin = kb * tiles_.keys;
    return {max_of<index_t>(block.keys.begin - origin, 0),
            min_of(block.keys.end - origin, plan_.keys_of(block.sequence, kb))};
  }

  void pack_seen(const Block& block, index_t kb, const Scratch& s) const {
    plan_.packed.pack(block.b, block.h / p_.group(), kb * tiles_.keys, plan_.keys_of(block.sequence, kb),
                      seen_columns(block, kb), block.packed, s.staging);
  }

  void scores(const Block& block, index_t kb, index_t r, const Columns& c, const Scratch& s) const {
    const Elem* const rows = s.rows + r * plan_.q_stride;
    multiply_strip<Target, false>({rows, plan_.q_stride, kStep},
                                  plan_.packed.k(block.packed + kb * block.packed_step, c.keys), 0,
                                  plan_.packed.depth(), c.first, c.last, s.scores, tiles_.keys);
  }

  void strip(const Block& block, index_t kb, index_t r, const Scratch& s) const {
    Columns c{};
    if (!columns(block, kb, {r, min_of(r + kRows, block.rows)}, c)) return;
    scores(block, kb, r, c, s);
    weigh(block, r, c, s);
    const Panels<Target> v = plan_.packed.v(block.packed + kb * block.packed_step, c.keys);
    multiply_strip<Target, true>({s.probabilities + c.begin, tiles_.keys, kStep}, v, c.begin, c.end, 0, v.count(),
                                 s.o + r * plan_.o_stride, plan_.o_stride);
  }

  struct Scaled {
    Real factor, top;
  };
  // Turns dot products of query row r into scores, -inf where it sees nothing. In log2 units once multiplied by
  // `factor`; `top` is their maximum.
  Scaled mask_and_transform(const Block& block, index_t r, const Columns& c, Real* x, const Scratch& s) const {
    const index_t i = block.query(r);
    const ScoreRule<Real> rule = block.rule(r);  // A copy, which no store to x can change.
    if (addend_.given() && !shares_addend(block))
      addend_.row(rule, block.b, block.head(r), i, block.heads == 1 && r + kRows < block.rows ? kRows : 0,
                  {c.origin + c.begin, c.origin + min_of(c.end, c.keys)}, s.addend + c.begin);
    const Real* const addend = addend_.given() ? s.addend : nullptr;
    const bool plain = !addend && !rule.has_softcap() && !rule.has_alibi() && rule.scale_log2 > Real(0);
    const auto transform = [&](index_t from, index_t to) {
      V top = V(-std::numeric_limits<Real>::infinity());
      V distance = V(Real(rule.diagonal(i) - c.origin - from)) - Simd::iota();
      for (index_t n = from; n < to; n += W, distance = distance - V(Real(W))) {
        V score = rule.logit(Simd::load(x + n), distance);
        if (addend) score = score + Simd::load(addend + n);
        Simd::store(x + n, score);
        top = vmax(top, score);
      }
      return top;
    };
    const auto maximum = [&](V top, index_t from, index_t to) {
      for (index_t n = from; n < to; n += W) top = vmax(top, Simd::load(x + n));
      return top;
    };
    const Range seen = rule.visible_keys(i);
    const index_t begin = min_of(max_of(seen.begin - c.origin, c.begin), c.end);
    const index_t end = max_of(min_of(seen.end - c.origin, c.end), begin);
    // Vectors of visible keys alone give their maximum on the way.
    const index_t inner = min_of(round_up(begin, W), c.end), inner_end = max_of(end / W * W, inner);
    V top;
    if (plain) {
      top = maximum(V(-std::numeric_limits<Real>::infinity()), inner, inner_end);
    } else {
      transform(c.begin, inner);
      top = transform(inner, inner_end);
      transform(inner_end, c.end);
    }
    fill(x, c.begin, begin, -std::numeric_limits<Real>::infinity());
    fill(x, end, c.end, -std::numeric_limits<Real>::infinity());
    top = maximum(maximum(top, c.begin, inner), inner_end, c.end);
    return {plain ? rule.scale_log2 : Real(1), Simd::reduce_max(top)};
  }

  void softmax(const Block& block, index_t r, const Columns& c, Real* x, Elem* probabilities, const Scratch& s) const {
    const auto [factor, top] = mask_and_transform(block, r, c, x, s);
    SoftmaxState<Real>& state = s.state[r];
    const Real rescale = state.raise(top * factor);
    if (rescale != Real(1)) {
      Real* const o = s.o + r * plan_.o_stride;
      for (index_t n = 0; n < plan_.o_stride; n += W) Simd::store(o + n, Simd::load(o + n) * V(rescale));
    }
    const DropoutRule dropout = p_.dropout;
    if (dropout.active)
      dropout_row<Simd, Target>(dropout, block.b, block.head(r), block.query(r), c.origin, c.end, s.dropout);
    const V shift = V(-state.shift());
    V sum = V(Real(0));
    for (index_t n = c.begin; n < c.end; n += W) {
      V p = exp2(fma(Simd::load(x + n), V(factor), shift));
      sum = sum + p;
      if (dropout.active) p = Simd::keep_where(p, s.dropout, n);
      Format::store(probabilities + n, p);
    }
    state.l += Simd::reduce_sum(sum);
  }

  void write_dmask_row(const Block& block, index_t r, const Columns& c, Real* x, const Scratch& s) const {
    const index_t i = block.query(r);
    const Real factor = mask_and_transform(block, r, c, x, s).factor;
    dropout_row<Simd, Target>(p_.dropout, block.b, block.h, i, c.origin, c.end, s.dropout);
    const V shift = V(-s.state[r].shift());
    for (index_t n = c.begin; n < c.end; n += W) {
      const V p = exp2(fma(Simd::load(x + n), V(factor), shift));
      const V kept = Simd::keep_where(p, s.dropout, n);
      Simd::store(x + n, kept + kept - p);
    }
    const index_t row = ((block.b * p_.H + block.h) * p_.Sq + i) * p_.Sk + c.origin + c.begin;
    plan_.format.store(x + c.begin, Real(1), min_of(c.end, c.keys) - c.begin,
                       static_cast<char*>(f_.s_dmask) + row * plan_.format.size);
  }

  const ForwardPlan<Target>& plan_;
  const ForwardProblem& f_;
  const Problem& p_;
  const Addend<Target>& addend_;
  const Tiles tiles_;
};

}  // namespace flash_attn::cpu
