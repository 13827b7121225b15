// A block of rows against its key blocks, strip by strip: scores, softmax, O += P * V.
#pragma once

#include <cstring>

#include "cpu/dropout_bits.h"
#include "cpu/forward_scores.h"
#include "cpu/forward_tiled.h"

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
  static constexpr index_t W = Simd::W, kStep = Format::kStep, kRows = Target::kRows;
  static constexpr int kAbreast = kRowsAbreast<Target>;
  using FixedStep = std::integral_constant<index_t, kStep>;
  // Whether the registers hold exp2 beside the accumulators of a product.
  static constexpr bool kOverlaps = W == 16 && kRows == kAbreast;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  explicit ForwardStrips(const ForwardPlan<Target>& plan)
      : plan_(plan),
        f_(plan.f),
        p_(plan.p),
        tiles_(plan.tiles),
        scores_(plan),
        tiled_(plan, scores_),
        stride_(plan.score_stride()) {}

  const ForwardScores<Target>& scores() const { return scores_; }

  // All rows of a block against key blocks from key keys.begin to keys.end, as far as they see any.
  void attend(const Block& block, Range keys, const Scratch& s) const {
    if (block.rows == 0 || block.keys.empty()) return;
    for (index_t origin = keys.begin; origin < min_of(keys.end, block.keys.end); origin += tiles_.keys) {
      if (origin + tiles_.keys <= block.keys.begin || plan_.hidden(block, origin)) continue;
      if (plan_.approach == Approach::in_place) pack_seen(block, origin, s);
      scores_.load_shared_addend(block, origin, s);
      for (index_t r = 0; r < block.rows; r += kRows) strip(block, origin, r, s);
    }
  }

  // K and V of the key block at key `origin`, as far as rows of a block see it, to where it is packed in place.
  void pack_seen(const Block& block, index_t origin, const Scratch& s) const {
    const index_t keys = plan_.keys_of(block.sequence, origin);
    const Panels<Target> panels = plan_.packed.k(block.packed, keys);
    const Range seen{max_of<index_t>(block.keys.begin - origin, 0), min_of(block.keys.end - origin, keys)};
    plan_.packed.pack(block.b, block.h / p_.group(), origin, keys, {panels.at(seen.begin), panels.at(seen.end - 1) + 1},
                      block.packed, s.staging);
  }

  // Rows that have seen no key have an o of zeros when all is done, which is not written before its first sum.
  void clear_unseen(const Block& block, const Scratch& s) const {
    for (index_t r = 0; r < block.rows; r += kRows)
      if (fresh(r, s)) clear(r, s);
  }

  // exp(score - row maximum), negative where dropped: a second walk, now that the maxima are known. In tiles they are
  // not (forward_tiled.h), and take a walk of their own.
  void write_dmask(const Block& block, const Scratch& s) const {
    if constexpr (Target::kTiled) {
      for (index_t r = 0; r < block.rows; ++r) s.state[r] = {};
      each_row_of_scores(block, s, [&](index_t r, const Columns& c, const Real* x, Real factor) {
        V top[1] = {V(-kInfinity)};
        search(x, {c.begin, c.end}, top);
        s.state[r].raise(Simd::reduce_max(top[0]) * factor);
      });
      for (index_t r = 0; p_.sink && r < block.rows; ++r) s.state[r].raise(sink_log2<Target>(p_, block.head(r)));
    }
    each_row_of_scores(block, s, [&](index_t r, const Columns& c, Real* x, Real factor) {
      write_dmask_row(block, r, c, x, factor, s);
    });
  }

  // Turns the scores of the strip at row r into probabilities, 0 in rows past the last that come along in products.
  void weigh(const Block& block, index_t r, const Columns& c, const Scratch& s) const {
    const index_t rows = min_of(kRows, block.rows - r);
    index_t n = 0;
    for (; n + kAbreast <= rows; n += kAbreast) softmax<kAbreast>(block, r, n, c, s);
    for (; n < rows; ++n) softmax<1>(block, r, n, c, s);
    for (; n < rows_of_products<Target>(block.rows); ++n) fill(s.probabilities + n * stride_, c.begin, c.end, Elem{});
  }

 private:
  template <int N>
  struct Shifts {
    Real factor[N], shift[N];  // exp2 is of score * factor + shift.
  };

  void dot_products(const Block& block, index_t r, const Columns& c, const Scratch& s) const {
    scores_.dot_products(block, r, c, {c.begin, c.end}, s.scores + c.begin, stride_);
  }

  // The maxima of a strip's rows, lane by lane, from products on their way to memory.
  struct Maxima {
    V top[kRows];
    StripAsks* asks;
    FA_INLINE void operator()(int r, V x) { top[r] = vmax(top[r], x); }
    FA_INLINE void begin_panel() { asks->ask(); }
  };
  // Whether the scores of a strip may be computed in pairs: a row's result is to depend on no other rows but those of
  // its W, which are the same however queries are cut into blocks, and on no other keys but those that they see.
  bool in_pairs(const Block& block, index_t r, const Columns& c, const Scratch& s) const {
    if constexpr (kHasPairs<Target>) {
      if (!plan_.pairs) return false;
      const PairSums<Target> of_keys = plan_.packed.pairs(block.packed);
      Elem most = 0;
      plan_.each_run(block, c.origin, {c.begin, c.end}, [&](Range part, index_t at) {
        most = max_of(most, of_keys.most_squares({at + part.begin, at + part.end}));
      });
      return double(most + s.pairs.squares[r / W]) * p_.scale <= kMostInPairs;
    }
    return false;
  }
  // Of the columns `watched` at most, which become those that were.
  Maxima scores_and_maxima(const Block& block, index_t r, const Columns& c, Range& watched, StripAsks& asks,
                           const Scratch& s) const {
    const StripA<Elem> rows = block.strip(r);
    const Panels<Target> k = plan_.k(block, c);
    Maxima maxima;
    maxima.asks = &asks;
    for (V& top : maxima.top) top = V(-kInfinity);
    Range all{c.begin, c.begin};
    [[maybe_unused]] const bool paired = in_pairs(block, r, c, s);
    plan_.each_run(block, c.origin, {c.begin, c.end}, [&](Range part, index_t at) {
      Range packed{at + max_of(watched.begin, part.begin), at + min_of(watched.end, part.end)};
      const auto multiply = [&] {
        if constexpr (kHasPairs<Target>)
          if (paired)
            return multiply_in_pairs<Target>(rows, k, s.pairs.products + r, plan_.packed.pairs(block.packed),
                                             at + part.begin, at + part.end, s.scores + part.begin, stride_, packed,
                                             maxima);
        multiply_watched<Target, false>(rows, k, 0, plan_.packed.depth(), at + part.begin, at + part.end,
                                        s.scores + part.begin, stride_, packed, maxima, false);
      };
      multiply();
      if (packed.empty()) return;
      all = {all.empty() ? packed.begin - at : all.begin, packed.end - at};
    });
    watched = all;
    return maxima;
  }

  // Hides what N rows of a plain strip, from row r on, do not see, and takes the columns that were not watched into the
  // maxima.
  template <int N>
  void hide(const Block& block, index_t r, const Columns& c, Range watched, V (&top)[N], Real* x) const {
    V begin[N], end[N];
    for (index_t t = 0; t < N; ++t) {
      const Range seen = block.rule(r + t).visible_keys(block.query(r + t));
      begin[t] = V(Real(seen.begin - c.origin)), end[t] = V(Real(seen.end - c.origin));
    }
    const V hidden(-kInfinity);
    const Range outside[] = {{c.begin, watched.begin}, {watched.end, c.end}};
    for (const Range& columns : outside)
      for (index_t n = columns.begin; n < columns.end; n += W) {
        const bool all = c.inner.begin <= n && n < c.inner.end;
        const V column = V(Real(n)) + Simd::iota();
        for (index_t t = 0; t < N; ++t) {
          Real* const at = x + t * stride_ + n;
          V score = Simd::load(at);
          if (!all) {
            score = select_between(column, begin[t], end[t], score, hidden);
            Simd::store(at, score);
          }
          top[t] = vmax(top[t], score);
        }
      }
  }

  // Whether nothing has been summed for the strip at row r: its o may hold anything.
  static bool fresh(index_t r, const Scratch& s) {
    for (index_t t = r; t < r + kRows; ++t)
      if (!s.state[t].empty()) return false;
    return true;
  }
  void clear(index_t r, const Scratch& s) const {
    fill(s.o, r * plan_.o_stride, (r + kRows) * plan_.o_stride, Real(0));
  }

  void strip(const Block& block, index_t origin, index_t r, const Scratch& s) const {
    Columns c{};
    if (!scores_.columns(block, origin, {r, min_of(r + kRows, block.rows)}, c)) return;
    if constexpr (kOverlaps)
      if (block.rows - r >= kRows && !p_.dropout.active) return weigh_and_multiply(block, r, c, s);
    const bool first_sum = fresh(r, s);
    if constexpr (Target::kTiled) {
      if (first_sum) clear(r, s);
      tiled_(block, r, c, s);
    } else {
      ask_for_queries(block, r + kRows, s);
      dot_products(block, r, c, s);
      weigh(block, r, c, s);
      multiply_values(block, r, c, 0, first_sum, s);
    }
  }

  // Those of the strip at row r that are read where they are: too far apart for the processor's own prefetchers. GCC
  // 12 drops calls of a function that does nothing but prefetch, unless it is inlined.
  FA_INLINE void ask_for_queries(const Block& block, index_t r, const Scratch& s) const {
    if (block.q == s.rows) return;
    for (index_t t = r; t < min_of(r + kRows, block.rows); ++t)
      prefetch_row(block.q + t * block.q_stride, p_.D * index_t(sizeof(Elem)));
  }

  // O += P V in features from `first` on.
  void multiply_values(const Block& block, index_t r, const Columns& c, index_t first, bool fresh,
                       const Scratch& s) const {
    const Panels<Target> v = plan_.v(block, c);
    plan_.each_run(block, c.origin, c.seen, [&](Range part, index_t at) {
      multiply_strip<Target, true>({s.probabilities + part.begin, stride_, kStep}, v, at + part.begin, at + part.end,
                                   first, plan_.o_stride, s.o + r * plan_.o_stride + first, plan_.o_stride,
                                   fresh && part.begin == c.seen.begin);
    });
  }

  // The products of keys with the first panel of V take in exp2 of keys a bit further on.
  void weigh_and_multiply(const Block& block, index_t r, const Columns& c, const Scratch& s) const {
    // Two turns of exp2, from where columns begin: products begin inside of the first one, and a sum of theirs ends
    // where a turn of all columns does, so both together are behind by one turn at most.
    constexpr index_t kAhead = 2 * kStep;
    static_assert(kStepsPerSum<Target> % W == 0 && kPackedKeys % (kStep * W) == 0, "sums end where turns do");
    StripAsks asks(s.block->next);
    Shifts<kRows> shifts;
    const bool first_sum = fresh(r, s);
    using Pitch = ScorePitch<Target>;
    Exponentials<Target, kRows, Pitch> weights(weigh_strip(block, r, c, shifts, asks, s));
    const Panels<Target> v = plan_.v(block, c);
    const index_t width = v.width(0);
    asks.ask_rest();
    weights.walk(kAhead);
    plan_.each_run(block, c.origin, c.seen, [&](Range part, index_t at) {
      const index_t begin = at + part.begin, end = at + part.end;
      multiply_panel_of<Target, true>(width / W, begin / kStep, end / kStep,
                                      StripA<Elem, Pitch, FixedStep>{s.probabilities + part.begin, {}, {}},
                                      v.panel(0) + begin * width, width * kStep, s.o + r * plan_.o_stride,
                                      plan_.o_stride, first_sum && part.begin == c.seen.begin, weights);
    });
    multiply_values(block, r, c, width, first_sum, s);
    end_softmax(weights, r, s);
  }

  // The scores of a whole strip and all of its softmax but exp2.
  Exponentials<Target, kRows> weigh_strip(const Block& block, index_t r, const Columns& c, Shifts<kRows>& shifts,
                                          StripAsks& asks, const Scratch& s) const {
    if (!c.plain) {
      dot_products(block, r, c, s);
      return begin_softmax<kRows>(block, r, 0, c, shifts, s);
    }
    const ScoreRule<Real>& rule = block.rules[0];
    Range watched = c.inner;
    Maxima maxima = scores_and_maxima(block, r, c, watched, asks, s);
    for (Real& factor : shifts.factor) factor = rule.factor();
    for (index_t t = 0; t < kRows && rule.has_softcap(); ++t) {
      cap_scores<Target>(rule, s.scores + t * stride_, {c.begin, c.end});
      maxima.top[t] = Format::tanh_of_product(maxima.top[t], V(rule.inverse_softcap));  // Capped, still the greatest.
    }
    hide(block, r, c, watched, maxima.top, s.scores);
    raise(s, r, maxima.top, shifts);
    return exponentials(0, c, shifts, s);
  }

  // Takes N rows of scores into their maxima, lane by lane.
  template <int N>
  FA_INLINE void search(const Real* x, Range columns, V (&top)[N]) const {
    for (index_t n = columns.begin; n < columns.end; n += W)
      for (int t = 0; t < N; ++t) top[t] = vmax(top[t], Simd::load(x + t * stride_ + n));
  }

  // Rows r + n .. r + n + N - 1 of a block, which are rows n .. of the strip that begins at r: scores, maxima and
  // states, all but exp2.
  template <int N>
  Exponentials<Target, N> begin_softmax(const Block& block, index_t r, index_t n, const Columns& c, Shifts<N>& shifts,
                                        const Scratch& s) const {
    Real* const x = s.scores + n * stride_;
    V top[N];
    if (c.plain) {
      for (int t = 0; t < N; ++t) {
        cap_scores<Target>(block.rules[0], x + t * stride_, {c.begin, c.end});
        shifts.factor[t] = block.rules[0].factor();
        top[t] = V(-kInfinity);
      }
      if (c.uniform())
        search(x, {c.begin, c.end}, top);
      else
        hide(block, r + n, c, {c.begin, c.begin}, top, x);
    } else {
      bool searched = true;
      for (int t = 0; t < N; ++t) {
        const auto scaled = scores_.mask_and_transform(block, r + n + t, c, x + t * stride_, s);
        shifts.factor[t] = scaled.factor;
        top[t] = scaled.top;
        searched = searched && scaled.searched;
      }
      if (!searched) search(x, {c.begin, c.end}, top);
    }
    raise(s, r + n, top, shifts);
    return exponentials(n, c, shifts, s);
  }
  template <int N>
  FA_INLINE Exponentials<Target, N> exponentials(index_t n, const Columns& c, const Shifts<N>& shifts,
                                                 const Scratch& s) const {
    const index_t at = n * stride_ + c.begin;
    return {s.scores + at, s.probabilities + at, (c.end - c.begin) / W, stride_, shifts.factor, shifts.shift};
  }
  template <int N, class Stride>
  FA_INLINE void end_softmax(const Exponentials<Target, N, Stride>& e, index_t first, const Scratch& s) const {
    for (int t = 0; t < N; ++t) s.state[first + t].l += Simd::reduce_sum(e.sum[t]);
  }

  template <int N>
  void softmax(const Block& block, index_t r, index_t n, const Columns& c, const Scratch& s) const {
    Shifts<N> shifts;
    Exponentials<Target, N> e = begin_softmax<N>(block, r, n, c, shifts, s);
    if (p_.dropout.active) {
      const index_t stride = plan_.dropout_stride();
      for (int t = 0; t < N; ++t) {
        const index_t row = r + n + t;
        dropout_row<Simd, Target>(p_.dropout, block.b, block.head(row), block.query(row), c.origin, c.end,
                                  s.dropout + t * stride);
      }
      e.walk(s.dropout, stride, c.begin);
    } else {
      e.walk((c.end - c.begin) / W);
    }
    end_softmax(e, r + n, s);
  }

  // Takes maxima of N rows, from row r on, into their states and rescales what was summed so far.
  template <int N>
  FA_INLINE void raise(const Scratch& s, index_t r, const V (&top)[N], Shifts<N>& shifts) const {
    Real highest[N];
    for (int t = 0; t < N; ++t) highest[t] = Simd::reduce_max(top[t]) * shifts.factor[t];
    for (int t = 0; t < N; ++t) {
      const bool empty = s.state[r + t].empty();
      const Real rescale = s.state[r + t].raise(highest[t]);
      shifts.shift[t] = -s.state[r + t].shift();
      if (empty || rescale == Real(1)) continue;  // Nothing summed so far is zeros.
      Real* const o = s.o + (r + t) * plan_.o_stride;
      for (index_t d = 0; d < plan_.o_stride; d += W) Simd::store(o + d, Simd::load(o + d) * V(rescale));
    }
  }

  // work(row, columns, scores, factor) for parts of the rows of a block: scores times the factor are in log2 units.
  template <class Work>
  void each_row_of_scores(const Block& block, Scratch s, const Work& work) const {
    for (index_t origin = plan_.first_key(block); origin < block.keys.end; origin += tiles_.keys) {
      scores_.load_shared_addend(block, origin, s);
      for (index_t r = 0; r < block.rows; r += kRows) {
        Columns c{};
        if (!scores_.columns(block, origin, {r, min_of(r + kRows, block.rows)}, c)) continue;
        for (index_t first = c.begin / stride_ * stride_; first < c.end; first += stride_) {
          const Columns part = scores_.part_of(c, first, stride_);
          scores_.dot_products(block, r, c, {first + part.begin, first + part.end}, s.scores + part.begin, stride_);
          Scratch of_part = s;
          if (s.addend) of_part.addend += first;
          for (index_t n = 0; n < min_of(kRows, block.rows - r); ++n) {
            Real* const x = s.scores + n * stride_;
            work(r + n, part, x, scores_.mask_and_transform(block, r + n, part, x, of_part).factor);
          }
        }
      }
    }
  }

  void write_dmask_row(const Block& block, index_t r, const Columns& c, Real* x, Real factor, const Scratch& s) const {
    const index_t i = block.query(r);
    dropout_row<Simd, Target>(p_.dropout, block.b, block.h, i, c.origin, c.end, s.dropout);
    const V shift = V(-s.state[r].shift());
    for (index_t n = c.begin; n < c.end; n += W) {
      const V p = softmax_weight(fma(Simd::load(x + n), V(factor), shift));
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
  const Tiles tiles_;
  const ForwardScores<Target> scores_;
  const ForwardTiled<Target> tiled_;
  const index_t stride_;  // Of scores and probabilities.
};

}  // namespace flash_attn::cpu
