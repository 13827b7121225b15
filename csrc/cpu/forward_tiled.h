// A strip of rows against a key block where products are made in tiles.
//
// A tile's products take few instructions and much power, and on a Xeon nothing is gained by running exp2 beside them
// (docs/cpu-amx.md). So one follows the other, and what counts is where things lie: a tile store to a line that is
// not in L1 holds up the products behind it. Scores of a few keys go through a small piece of memory that stays in L1;
// probabilities, written by vectors over a longer time, wait until there are more of them, for O to be read and written
// less often.
//
// A row's weights are relative to the maximum that it began with: as long as no score is above it by more than a few
// powers of two, nothing has to be scaled anew. Weights are computed first and looked at afterwards.
#pragma once

#include "cpu/dropout_bits.h"
#include "cpu/forward_scores.h"

namespace flash_attn::cpu {

// What exponents take beside a factor and a shift, as far as the compiler is to know: a part as long as they get;
// columns that rows do not see; a bias or mask; ALiBi; dropout.
template <bool Whole, bool Edges = false, bool Added = false, bool Alibi = false, bool Dropped = false>
struct ExponentKind {
  static constexpr bool kWhole = Whole, kEdges = Edges, kAdded = Added, kAlibi = Alibi, kDropped = Dropped;
};

template <class Target>
class ForwardTiled {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Format = typename Target::Format;
  using Block = ForwardBlock<Target>;
  using Scratch = ForwardScratch<Target>;
  static constexpr index_t W = Simd::W, kStep = Format::kStep, kRows = Target::kRows;
  static constexpr index_t kScores = ScorePitch<Target>(), kPending = ProbabilityPitch<Target>();
  static constexpr index_t kRow = kPending * Target::kParts;  // Elements of a row of probabilities.
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  // How far weights may exceed 1, as a power of two.
  static constexpr Real kHighest = 8;

 public:
  ForwardTiled(const ForwardPlan<Target>& plan, const ForwardScores<Target>& scores)
      : plan_(plan), p_(plan.p), scores_(scores), added_(plan.addend.given()), alibi_(plan.p.alibi_slopes) {}

  void operator()(const Block& block, index_t r, const Columns& c, const Scratch& s) const {
    Strip strip{block, r, min_of(kRows, block.rows - r), c, s, {}, {}, {}, true};
    for (index_t t = 0; t < strip.rows; ++t) strip.row[t] = row_of(block, r + t, c.origin, s);
    if (strip.rows < kRows) strip.row[strip.rows].rule = block.rules;  // It may be the second of a pair.
    fill(s.probabilities, strip.rows * kRow, kRows * kRow, Elem{});
    if (alibi_) look_about_diagonal(strip);
    for (index_t first = c.begin / kPending * kPending; first < c.end; first += kPending) {
      strip.waiting = {max_of(first, c.begin), max_of(first, c.begin)};
      const index_t end = min_of(first + kPending, c.end);
      if (p_.dropout.active && (first <= c.begin || first % kKeysDrawn == 0))
        draw_dropout(strip, first / kKeysDrawn * kKeysDrawn);
      for (index_t n = first; n < end; n += kScores)
        if (n + kScores > c.begin) meet(strip, {max_of(n, c.begin), min_of(n + kScores, end)});
      multiply_values(strip);
    }
    for (index_t t = 0; t < strip.rows; ++t) s.state[r + t].l += Simd::reduce_sum(strip.sum[t]);
  }

 private:
  // A row's exponents are its products * factor + shift, what its rule adds for ALiBi, and its bias or mask.
  struct Row {
    const ScoreRule<Real>* rule;
    Real factor, shift, diagonal;
    Real begin, end;  // The columns that it sees.
  };
  struct Strip {
    const Block& block;
    const index_t r, rows;
    const Columns& c;
    const Scratch& s;
    Row row[kRows];
    V sum[kRows];    // Of weights that are not in the state of their row yet.
    Range waiting;   // Columns whose probabilities have not met V.
    bool unsettled;  // Whether rows may have no maximum yet.
  };

  static Row row_of(const Block& block, index_t r, index_t origin, const Scratch& s) {
    const ScoreRule<Real>& rule = block.rule(r);
    const Range seen = rule.visible_keys(block.query(r));
    return {&rule,
            rule.factor(),
            -s.state[r].shift(),
            Real(rule.diagonal(block.query(r)) - origin),
            Real(seen.begin - origin),
            Real(seen.end - origin)};
  }

  // The strip meets the keys of `columns`, kScores at most, whose probabilities then wait.
  void meet(Strip& strip, Range columns) const {
    multiply_keys(strip, columns);
    as_kind(strip.c, columns, [&](auto kind) { weigh<decltype(kind)>(strip, columns); });
    strip.waiting.end = columns.end;
  }

  // With ALiBi the greatest scores of a block are about the diagonal. Had their maxima to be found on the way there,
  // from keys far away, all would be scaled anew every few keys.
  void look_about_diagonal(Strip& strip) const {
    const Columns& c = strip.c;
    const auto middle = static_cast<index_t>(strip.row[strip.rows / 2].diagonal);
    const index_t begin = min_of(max_of(middle, c.begin), c.end - 1) / kScores * kScores;
    const Range columns{max_of(begin, c.begin), min_of(begin + kScores, c.end)};
    multiply_keys(strip, columns);
    as_kind(c, columns, [&](auto kind) { find_maxima<decltype(kind), true>(strip, columns); });
  }

  // Dot products, capped if they are to be.
  void multiply_keys(const Strip& strip, Range columns) const {
    scores_.dot_products(strip.block, strip.r, strip.c, columns, strip.s.scores, kScores);
    for (index_t t = 0; t < strip.rows && p_.softcap != 0; ++t)
      cap_scores<Target>(strip.block.rule(strip.r + t), strip.s.scores + t * kScores, {0, columns.end - columns.begin});
  }

  // Runs work(ExponentKind) for these columns.
  template <class Work>
  FA_INLINE void as_kind(const Columns& c, Range columns, const Work& work) const {
    const bool edges = columns.begin < c.inner.begin || c.inner.end < columns.end;
    if (p_.dropout.active && (added_ || alibi_))
      work(ExponentKind<false, true, true, true, true>());  // Zeros, where one of them is not given.
    else if (p_.dropout.active)
      edges ? work(ExponentKind<false, true, false, false, true>())
            : work(ExponentKind<false, false, false, false, true>());
    else if (added_ && alibi_)
      work(ExponentKind<false, true, true, true>());
    else if (added_)
      edges ? work(ExponentKind<false, true, true>()) : work(ExponentKind<false, false, true>());
    else if (alibi_)
      edges ? work(ExponentKind<false, true, false, true>()) : work(ExponentKind<false, false, false, true>());
    else if (edges)
      work(ExponentKind<false, true>());
    else
      columns.end - columns.begin == kScores ? work(ExponentKind<true>()) : work(ExponentKind<false>());
  }

  // Of vector n of the columns from `begin` on; products and addend are the row's.
  template <class Kind>
  static FA_INLINE V exponent(const Row& row, const Real* products, const Real* addend, index_t begin, index_t n) {
    const V column = V(Real(begin + n * W)) + Simd::iota();
    V x = fma(Simd::load(products + n * W), V(row.factor), V(row.shift));
    if constexpr (Kind::kAlibi) x = row.rule->add_alibi(x, V(row.diagonal) - column);
    if constexpr (Kind::kAdded) x = x + Simd::load(addend + n * W);
    if constexpr (Kind::kEdges) x = select_between(column, V(row.begin), V(row.end), x, V(-kInfinity));
    return x;
  }

  // What is added to the scores of row t, perhaps in the memory given.
  const Real* addend_of(const Strip& strip, index_t t, Range columns, Real* memory) const {
    const Block& block = strip.block;
    const Columns& c = strip.c;
    const index_t r = strip.r + t;
    if (added_ && scores_.shares_addend(block)) return strip.s.addend + columns.begin;
    if (added_ && t < strip.rows)
      plan_.addend.row(block.rule(r), block.b, block.head(r), block.query(r), {0, columns.end < c.end ? kScores : 0},
                       {c.origin + columns.begin, c.origin + min_of(columns.end, c.keys)}, memory);
    else
      fill(memory, 0, kScores, Real(0));
    return memory;
  }

  // Rows in pairs, which share what a loop costs.
  template <class Kind>
  void weigh(Strip& strip, Range columns) const {
    if (strip.unsettled) find_maxima<Kind>(strip, columns);
    for (index_t t = 0; t < strip.rows; t += 2) {
      alignas(64) Real memory[2][kScores];
      const Real* addend[2] = {};
      for (int i = 0; i < 2 && Kind::kAdded; ++i) addend[i] = addend_of(strip, t + i, columns, memory[i]);
      V sum[2] = {strip.sum[t], strip.sum[t + 1]}, top[2];
      weigh_rows<Kind>(strip, t, columns, addend, sum, top);
      if (Simd::any_less(V(kHighest), vmax(top[0], top[1]))) {
        for (int i = 0; i < 2; ++i)
          if (t + i < strip.rows && Simd::any_less(V(kHighest), top[i]))
            raise(strip, t + i, strip.s.state[strip.r + t + i].m + Simd::reduce_max(top[i]));
        sum[0] = strip.sum[t], sum[1] = strip.sum[t + 1];
        weigh_rows<Kind>(strip, t, columns, addend, sum, top);
      }
      strip.sum[t] = sum[0], strip.sum[t + 1] = sum[1];
    }
  }

  // Probabilities of rows t and t + 1, as multiplicands. Adds their weights to sum; gives the greatest exponents.
  template <class Kind>
  FA_INLINE void weigh_rows(const Strip& strip, index_t t, Range columns, const Real* const (&addend)[2], V (&sum)[2],
                            V (&top)[2]) const {
    const index_t vectors = Kind::kWhole ? kScores / W : (columns.end - columns.begin) / W;
    const Real* const products = strip.s.scores + t * kScores;
    Elem* const to = strip.s.probabilities + t * kRow + columns.begin % kPending;
    const std::uint8_t* const kept = strip.s.dropout + t * (kKeysDrawn / 8);
    for (int i = 0; i < 2; ++i) {
      const Row row = strip.row[t + i];
      V sums[kStep], tops[kStep];
      for (int v = 0; v < kStep; ++v) sums[v] = V(Real(0)), tops[v] = V(-kInfinity);
      for (index_t n = 0; n < vectors; n += kStep) {
        V weights[kStep];
        for (int v = 0; v < kStep; ++v) {
          const V x = exponent<Kind>(row, products + i * kScores, addend[i], columns.begin, n + v);
          tops[v] = vmax(tops[v], x);
          weights[v] = softmax_weight(x);
          sums[v] = sums[v] + weights[v];
          if constexpr (Kind::kDropped)
            weights[v] =
                Simd::keep_where(weights[v], kept + i * (kKeysDrawn / 8), (columns.begin + (n + v) * W) % kKeysDrawn);
        }
        Format::store_all(to + i * kRow + n * W, kPending, weights);
      }
      for (int v = 1; v < kStep; ++v) sums[0] = sums[0] + sums[v], tops[0] = vmax(tops[0], tops[v]);
      sum[i] = sum[i] + sums[0];
      top[i] = tops[0];
    }
  }

  // Maxima of rows that have none yet; of all of them, where these columns have greater scores than others.
  template <class Kind, bool All = false>
  void find_maxima(Strip& strip, Range columns) const {
    strip.unsettled = false;
    for (index_t t = 0; t < strip.rows; ++t) {
      const SoftmaxState<Real>& state = strip.s.state[strip.r + t];
      if (!All && state.m > -kInfinity) continue;
      alignas(64) Real memory[kScores];
      const Real* const addend = Kind::kAdded ? addend_of(strip, t, columns, memory) : nullptr;
      Row row = strip.row[t];
      row.shift = Real(0);
      V top(-kInfinity);
      for (index_t n = 0; n < (columns.end - columns.begin) / W; ++n)
        top = vmax(top, exponent<Kind>(row, strip.s.scores + t * kScores, addend, columns.begin, n));
      const Real highest = Simd::reduce_max(top);
      if (highest > state.m + kHighest) raise(strip, t, highest);
      strip.unsettled = strip.unsettled || !(state.m > -kInfinity);
    }
  }

  // A new maximum of row t. Probabilities that wait are relative to the old one, and meet V first.
  void raise(Strip& strip, index_t t, Real highest) const {
    SoftmaxState<Real>& state = strip.s.state[strip.r + t];
    state.l += Simd::reduce_sum(strip.sum[t]);
    strip.sum[t] = V(Real(0));
    const bool empty = state.empty();
    if (!empty) multiply_values(strip);
    const Real rescale = state.raise(highest);
    strip.row[t].shift = -state.shift();
    if (empty || rescale == Real(1)) return;
    Real* const o = strip.s.o + (strip.r + t) * plan_.o_stride;
    for (index_t d = 0; d < plan_.o_stride; d += W) Simd::store(o + d, Simd::load(o + d) * V(rescale));
  }

  // O += P V for the columns that wait.
  void multiply_values(Strip& strip) const {
    if (strip.waiting.empty()) return;
    const Panels<Target> v = plan_.v(strip.block, strip.c);
    plan_.each_run(strip.block, strip.c.origin, strip.waiting, [&](Range part, index_t at) {
      multiply_strip<Target, true>({strip.s.probabilities + part.begin % kPending, kRow, kStep}, v, at + part.begin,
                                   at + part.end, 0, plan_.o_stride, strip.s.o + strip.r * plan_.o_stride,
                                   plan_.o_stride);
    });
    strip.waiting.begin = strip.waiting.end;
  }

  // Which probabilities of the columns from `first` on are kept.
  void draw_dropout(const Strip& strip, index_t first) const {
    const Block& block = strip.block;
    for (index_t t = 0; t < strip.rows; ++t)
      dropout_row<Simd, Target>(p_.dropout, block.b, block.head(strip.r + t), block.query(strip.r + t),
                                strip.c.origin + first, kKeysDrawn, strip.s.dropout + t * (kKeysDrawn / 8));
  }

  const ForwardPlan<Target>& plan_;
  const Problem& p_;
  const ForwardScores<Target>& scores_;
  const bool added_, alibi_;
};

}  // namespace flash_attn::cpu
