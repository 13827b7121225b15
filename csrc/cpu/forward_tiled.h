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

// What is added to the exponents of a row: nothing, what a bias or mask makes in log2 units, or a bias as it is in
// memory, of the problem's own dtype.
enum class Addends { none, made, bias };

// What exponents take beside a factor and a shift, as far as the compiler is to know: columns that rows do not see; a
// bias or mask; ALiBi; dropout.
template <bool Edges = false, Addends Added = Addends::none, bool Alibi = false, bool Dropped = false>
struct ExponentKind {
  static constexpr Addends kAddends = Added;
  static constexpr bool kEdges = Edges, kAdded = Added != Addends::none, kAlibi = Alibi, kDropped = Dropped;
};

template <class Target>
class ForwardTiled {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Stored = StoredAs<Target>;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Format = typename Target::Format;
  using Block = ForwardBlock<Target>;
  using Scratch = ForwardScratch<Target>;
  static constexpr index_t W = Simd::W, kHalf = Target::kWidth, kStep = Format::kStep, kRows = Target::kRows;
  static constexpr index_t kScores = ScorePitch<Target>(), kPending = ProbabilityPitch<Target>();
  static_assert(!Target::kTiled || (kHalf == 2 * W && kScores == 2 * kHalf && kScores == kKeyAlign));
  static constexpr index_t kRow = kPending * Target::kParts;  // Elements of a row of probabilities.
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  // Between rows of weights a strip asks for what comes later. A few lines at a time, as they come from a cache that
  // all cores share: asked for in a row they wait for each other, and all behind them.
  static constexpr index_t kRowsPerAsk = 8;
  // How far weights may exceed 1, as a power of two, and what a lane's sum of a few of them may be.
  static constexpr Real kHighest = 8, kMostWeight = 256;

 public:
  ForwardTiled(const ForwardPlan<Target>& plan, const ForwardScores<Target>& scores)
      : plan_(plan),
        p_(plan.p),
        scores_(scores),
        added_(plan.addend.given()),
        alibi_(plan.p.alibi_slopes),
        reads_bias_(plan.addend.template is_bias_of<Stored>()) {}

  void operator()(const Block& block, index_t r, const Columns& c, const Scratch& s) const {
    Strip strip(block, r, c, s);
    begin_rows(strip);
    if (p_.dropout.active) name_rows(strip);
    fill(s.probabilities, strip.rows * kRow, kRows * kRow, Elem{});
    if (alibi_) look_about_diagonal(strip);
    for (index_t first = c.begin / kPending * kPending; first < c.end; first += kPending) {
      strip.waiting = {max_of(first, c.begin), max_of(first, c.begin)};
      const index_t end = min_of(first + kPending, c.end);
      for (index_t n = first; n < end; n += kScores)
        if (n + kScores > c.begin) meet(strip, {max_of(n, c.begin), min_of(n + kScores, end)});
      multiply_values(strip);
    }
    strip.asks.ask_rest();
    alignas(64) Real sums[kRows];
    for (index_t t = 0; t < kRows; t += W) Simd::store(sums + t, Simd::sum_each(strip.sum + t));
    for (index_t t = 0; t < strip.rows; ++t) s.state[r + t].l += sums[t];
  }

 private:
  // A row's exponents are its products * factor + shift - slope * its distance from `diagonal` (ALiBi), and its bias or
  // mask.
  struct Row {
    Real factor, shift, slope, diagonal;
    Real begin, end;  // The columns that it sees.
  };
  // Of a strip, number by number: rows written by scalars and copied by vectors would wait for each store.
  struct Rows {
    Real factor, shift[kRows], slope[kRows], diagonal[kRows], begin[kRows], end[kRows];

    FA_INLINE Row operator[](index_t t) const { return {factor, shift[t], slope[t], diagonal[t], begin[t], end[t]}; }
  };
  struct Strip {
    Strip(const Block& of_block, index_t first, const Columns& columns, const Scratch& scratch)
        : block(of_block), r(first), rows(min_of(kRows, block.rows - r)), c(columns), s(scratch) {
      for (V& x : sum) x = V(Real(0));
    }

    const Block& block;
    const index_t r, rows;
    const Columns& c;
    const Scratch& s;
    Rows row{};
    V sum[kRows];   // Of weights that are not in the state of their row yet.
    Range waiting;  // Columns whose probabilities have not met V.
    StripAsks asks{s.block->next};
    bool unsettled = true;  // Whether rows may have no maximum yet.
    // Of rows, with dropout (DropoutRows).
    std::uint64_t queries[kRows * DropoutRows::kLanesOfRow], heads[kRows * DropoutRows::kLanesOfRow];
  };

  void begin_rows(Strip& strip) const {
    const Block& block = strip.block;
    const Columns& c = strip.c;
    Rows& row = strip.row;
    row.factor = block.rules->factor();
    const bool edges = p_.dropout.active || c.begin < c.inner.begin || c.inner.end < c.end;
    for (index_t t = 0; t < strip.rows; ++t) row.shift[t] = -strip.s.state[strip.r + t].shift();
    if (!edges && !alibi_) return;
    for (index_t t = 0; t < strip.rows; ++t) {
      const index_t r = strip.r + t, i = block.query(r);
      const ScoreRule<Real>& rule = block.rule(r);
      const Range seen = rule.visible_keys(i);
      row.slope[t] = rule.slope_log2, row.diagonal[t] = Real(rule.diagonal(i) - c.origin);
      row.begin[t] = Real(seen.begin - c.origin), row.end[t] = Real(seen.end - c.origin);
    }
  }

  static void name_rows(Strip& strip) {
    for (index_t n = 0; n < kRows * DropoutRows::kLanesOfRow; ++n) {
      const index_t r = strip.r + min_of(n / DropoutRows::kLanesOfRow, strip.rows - 1);
      strip.queries[n] = std::uint64_t(strip.block.query(r)), strip.heads[n] = std::uint64_t(strip.block.head(r));
    }
  }

  // The strip meets the keys of `columns`, kScores or half of that, whose probabilities then wait.
  void meet(Strip& strip, Range columns) const {
    multiply_keys(strip, columns, p_.dropout.active);
    as_kind(strip.c, columns, [&](auto kind) {
      if (columns.end - columns.begin == kScores)
        weigh<decltype(kind), kScores / W>(strip, columns);
      else
        weigh<decltype(kind), kHalf / W>(strip, columns);
    });
    strip.waiting.end = columns.end;
  }

  // With ALiBi the greatest scores of a block are about the diagonal. Had their maxima to be found on the way there,
  // from keys far away, all would be scaled anew every few keys.
  void look_about_diagonal(Strip& strip) const {
    const Columns& c = strip.c;
    const auto middle = static_cast<index_t>(strip.row.diagonal[strip.rows / 2]);
    const index_t begin = min_of(max_of(middle, c.begin), c.end - 1) / kScores * kScores;
    const Range columns{max_of(begin, c.begin), min_of(begin + kScores, c.end)};
    multiply_keys(strip, columns, false);
    as_kind(c, columns, [&](auto kind) { find_maxima<decltype(kind), true>(strip, columns); });
  }

  // Dot products of the strip with some keys, capped if they are to be; with `draws`, which of their weights are kept.
  // Work of vectors other than weights goes between the products of halves: tiles would sleep the longer after all of
  // it at once (docs/cpu-amx.md).
  void multiply_keys(const Strip& strip, Range columns, bool draws) const {
    const Scratch& s = strip.s;
    const bool caps = p_.softcap != 0;
    const index_t step = caps || draws ? kHalf : kScores, rows_drawn = kRows * step / (columns.end - columns.begin);
    Range drawn{0, rows_drawn};
    for (index_t n = columns.begin; n < columns.end; n += step) {
      Real* const x = s.scores + (n - columns.begin);
      scores_.dot_products(strip.block, strip.r, strip.c, {n, min_of(n + step, columns.end)}, x, kScores);
      if (caps) cap_rows<Target>(*strip.block.rules, x, kScores, strip.rows);
      if (draws)
        dropout_rows<Simd, Target>(p_.dropout, strip.block.b, {strip.queries, strip.heads}, drawn,
                                   strip.c.origin + columns.begin / kKeyAlign * kKeyAlign, s.dropout);
      drawn = {drawn.end, drawn.end + rows_drawn};
    }
  }

  // Runs work(ExponentKind) for these columns.
  template <class Work>
  FA_INLINE void as_kind(const Columns& c, Range columns, const Work& work) const {
    const bool edges = columns.begin < c.inner.begin || c.inner.end < columns.end;
    constexpr Addends none = Addends::none, made = Addends::made;
    if (p_.dropout.active && (added_ || alibi_))
      work(ExponentKind<true, made, true, true>());  // Zeros, where one of them is not given.
    else if (p_.dropout.active)
      edges ? work(ExponentKind<true, none, false, true>()) : work(ExponentKind<false, none, false, true>());
    else if (added_ && alibi_)
      work(ExponentKind<true, made, true>());
    else if (added_ && (edges || !reads_bias_))
      edges ? work(ExponentKind<true, made>()) : work(ExponentKind<false, made>());
    else if (added_)
      work(ExponentKind<false, Addends::bias>());
    else if (alibi_)
      edges ? work(ExponentKind<true, none, true>()) : work(ExponentKind<false, none, true>());
    else
      edges ? work(ExponentKind<true>()) : work(ExponentKind<>());
  }

  // Of vector n of the columns whose first ones are `first`; products and addend are the row's.
  template <class Kind, class Number>
  static FA_INLINE V exponent(const Row& row, const Real* products, const Number* addend, V first, index_t n) {
    V x = fma(Simd::load(products + n * W), V(row.factor), V(row.shift));
    if constexpr (Kind::kAlibi) x = fma(V(-row.slope), vabs(V(row.diagonal) - first - V(Real(n * W))), x);
    if constexpr (Kind::kAddends == Addends::made) x = x + Simd::load(addend + n * W);
    if constexpr (Kind::kAddends == Addends::bias) x = Addend<Target>::add_bias(x, addend + n * W);
    if constexpr (Kind::kEdges) x = select_between(first + V(Real(n * W)), V(row.begin), V(row.end), x, V(-kInfinity));
    return x;
  }
  static FA_INLINE V first_of(Range columns) { return V(Real(columns.begin)) + Simd::iota(); }

  // What is added to the scores of the rows of a strip, for Kind.
  template <class Kind>
  class AddendRows {
   public:
    using Number = std::conditional_t<Kind::kAddends == Addends::bias, Stored, Real>;

    FA_INLINE AddendRows(const ForwardTiled& tiled, const Strip& strip, Range columns)
        : tiled_(tiled),
          strip_(strip),
          columns_(columns),
          shared_(Kind::kAdded && tiled.added_ && tiled.scores_.shares_addend(strip.block)) {}
    // Of row t, perhaps in the memory given.
    FA_INLINE const Number* row(index_t t, Real* memory) const {
      if constexpr (Kind::kAddends == Addends::bias) return bias_row(t);
      if constexpr (Kind::kAddends == Addends::made)
        return shared_ ? strip_.s.addend + columns_.begin : made(t, memory);
      return nullptr;
    }

   private:
    // Rows past the last one read what is there of it. Asks for what the next columns want: rows lie too far apart for
    // the processor to do so in time.
    FA_INLINE const Stored* bias_row(index_t t) const {
      const Block& block = strip_.block;
      const index_t r = strip_.r + min_of(t, strip_.rows - 1);
      const Stored* const row = tiled_.plan_.addend.template bias_row<Stored>(block.b, block.head(r), block.query(r),
                                                                              strip_.c.origin + columns_.begin);
      for (index_t n = kScores; n < 2 * kScores; n += kCacheLine / index_t(sizeof(Stored))) FA_PREFETCH(row + n);
      return row;
    }
    const Real* made(index_t t, Real* memory) const {
      const Block& block = strip_.block;
      const Columns& c = strip_.c;
      const index_t r = strip_.r + t;
      if (tiled_.added_ && t < strip_.rows)
        tiled_.plan_.addend.row(block.rule(r), block.b, block.head(r), block.query(r),
                                {0, columns_.end < c.end ? kScores : 0},
                                {c.origin + columns_.begin, c.origin + min_of(columns_.end, c.keys)}, memory);
      else
        fill(memory, 0, kScores, Real(0));
      return memory;
    }

    const ForwardTiled& tiled_;
    const Strip& strip_;
    const Range columns_;
    const bool shared_;
  };

  // Rows in pairs, which share what a loop costs.
  template <class Kind, index_t Vectors>
  void weigh(Strip& strip, Range columns) const {
    if (strip.unsettled) find_maxima<Kind>(strip, columns);
    const AddendRows<Kind> addends(*this, strip, columns);
    for (index_t t = 0; t < strip.rows; t += 2) {
      alignas(64) Real memory[2][kScores];
      const auto *first = addends.row(t, memory[0]), *second = addends.row(t + 1, memory[1]);
      V sum[2];
      weigh_rows<Kind, Vectors>(strip, t, columns.begin, {first, second}, sum);
      if (too_great(sum[0]) || too_great(sum[1])) {
        for (int i = 0; i < 2; ++i)
          if (t + i < strip.rows && too_great(sum[i]))
            raise(strip, t + i, Simd::reduce_max(highest<Kind>(strip, t + i, columns, i == 0 ? first : second)));
        weigh_rows<Kind, Vectors>(strip, t, columns.begin, {first, second}, sum);
      }
      for (int i = 0; i < 2; ++i) strip.sum[t + i] = strip.sum[t + i] + sum[i];
      if (t % kRowsPerAsk == 0) strip.asks.ask();
    }
  }
  static FA_INLINE bool too_great(V sums) { return Simd::any_less(V(kMostWeight), sums); }

  // Probabilities of rows t and t + 1, as multiplicands, and the sums of their weights, lane by lane.
  template <class Kind, index_t Vectors>
  FA_INLINE void weigh_rows(const Strip& strip, index_t t, index_t begin,
                            const typename AddendRows<Kind>::Number* const (&addend)[2], V (&sum)[2]) const {
    const Real* const products = strip.s.scores + t * kScores;
    Elem* const to = strip.s.probabilities + t * kRow + begin % kPending;
    const std::uint8_t* const kept = strip.s.dropout + (t * kKeyAlign + begin % kKeyAlign) / 8;
    const V first = first_of({begin, begin});
    for (int i = 0; i < 2; ++i) {
      const Row row = strip.row[t + i];
      V sums[kStep];
      for (index_t n = 0; n < Vectors; n += kStep) {
        V weights[kStep];
        for (int v = 0; v < kStep; ++v) {
          weights[v] = Format::weight(exponent<Kind>(row, products + i * kScores, addend[i], first, n + v));
          sums[v] = n == 0 ? weights[v] : sums[v] + weights[v];
          if constexpr (Kind::kDropped)
            weights[v] = Simd::keep_where(weights[v], kept + i * (kKeyAlign / 8), (n + v) * W);
        }
        Format::store_all(to + i * kRow + n * W, kPending, weights);
      }
      sum[i] = sums[0];
      for (int v = 1; v < kStep; ++v) sum[i] = sum[i] + sums[v];
    }
  }

  // Maxima of rows that have none yet; of all of them, where these columns have greater scores than others.
  template <class Kind, bool All = false>
  void find_maxima(Strip& strip, Range columns) const {
    strip.unsettled = false;
    const AddendRows<Kind> addends(*this, strip, columns);
    for (index_t first = 0; first < strip.rows; first += W) {
      V top[W];
      alignas(64) Real memory[kScores], most[W];
      for (index_t i = 0; i < W; ++i) top[i] = highest<Kind>(strip, first + i, columns, addends.row(first + i, memory));
      Simd::store(most, Simd::max_each(top));
      for (index_t t = first; t < min_of(first + W, strip.rows); ++t) {
        const SoftmaxState<Real>& state = strip.s.state[strip.r + t];
        if (!All && state.m > -kInfinity) continue;
        if (most[t - first] > state.m + kHighest) raise(strip, t, most[t - first]);
        strip.unsettled = strip.unsettled || !(state.m > -kInfinity);
      }
    }
  }
  // The greatest scores of row t among these columns, lane by lane.
  template <class Kind>
  static V highest(const Strip& strip, index_t t, Range columns, const typename AddendRows<Kind>::Number* addend) {
    Row row = strip.row[t];
    row.shift = Real(0);
    V top(-kInfinity);
    for (index_t n = 0; n < (columns.end - columns.begin) / W; ++n)
      top = vmax(top, exponent<Kind>(row, strip.s.scores + t * kScores, addend, first_of(columns), n));
    return top;
  }

  // A new maximum of row t.
  FA_INLINE void raise(Strip& strip, index_t t, Real highest) const {
    SoftmaxState<Real>& state = strip.s.state[strip.r + t];
    if (state.m > -kInfinity)
      rescale(strip, t, highest);
    else
      state.m = highest;  // All of its weights were 0.
    strip.row.shift[t] = -state.shift();
  }
  // Probabilities that wait are relative to the old maximum, and meet V first.
  void rescale(Strip& strip, index_t t, Real highest) const {
    SoftmaxState<Real>& state = strip.s.state[strip.r + t];
    state.l += Simd::reduce_sum(strip.sum[t]);
    strip.sum[t] = V(Real(0));
    const bool empty = state.empty();
    if (!empty) multiply_values(strip);
    const Real factor = state.raise(highest);
    if (empty || factor == Real(1)) return;
    Real* const o = strip.s.o + (strip.r + t) * plan_.o_stride;
    for (index_t d = 0; d < plan_.o_stride; d += W) Simd::store(o + d, Simd::load(o + d) * V(factor));
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

  const ForwardPlan<Target>& plan_;
  const Problem& p_;
  const ForwardScores<Target>& scores_;
  const bool added_, alibi_, reads_bias_;
};

}  // namespace flash_attn::cpu
