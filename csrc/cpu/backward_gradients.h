// The element-wise part of a backward strip: from S^T and dP^T, fresh from the products, to P^T and dS^T.
#pragma once

#include "cpu/backward_block.h"
#include "cpu/capped_scores.h"
#include "cpu/dropout_bits.h"
#include "cpu/exponentials.h"
#include "cpu/score_gradients.h"
#include "cpu/score_tables.h"

namespace flash_attn::cpu {

template <class Target>
class BackwardGradients {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Format = typename Target::Format;
  using Scratch = BackwardScratch<Target>;
  static constexpr index_t W = Simd::W, kRows = Target::kRows, kAbreast = kRowsAbreast<Target>;

 public:
  BackwardGradients(const Problem& p, const Addend<Target>& addend, Tiles tiles)
      : p_(p), addend_(addend), tiles_(tiles), pitch_(gradient_pitch<Target>(tiles)) {}

  // Row t of a strip is seen by queries from column begin[t] to end[t].
  struct Edges {
    Real begin[kRows], end[kRows];
  };
  // What one strip works on.
  struct Strip {
    const ScoreRule<Real>& rule;
    Range keys;                    // Of the sequence; kRows at most.
    index_t row;                   // Of the first of them in the key block.
    index_t first;                 // The query of column 0.
    const Real *lse_log2, *delta;  // Of the query block.
    Edges edges;
    Range inner;  // Columns of queries that see all keys.
  };
  Strip strip(const ScoreRule<Real>& rule, Range keys, index_t row, index_t first, Range columns, const Real* lse_log2,
              const Real* delta) const {
    Strip strip{rule, keys, row, first, lse_log2, delta, {}, columns};
    for (index_t t = 0; t < kRows; ++t) {
      const index_t key = keys.begin + t;
      const Range seen = key < keys.end ? rule.visible_queries(key) : Range{first, first};
      strip.edges.begin[t] = Real(seen.begin - first), strip.edges.end[t] = Real(seen.end - first);
      strip.inner = {max_of(strip.inner.begin, seen.begin - first), min_of(strip.inner.end, seen.end - first)};
    }
    return strip;
  }

  // Of some columns of a strip, whole vectors: s.scores holds q.k and s.dp dout.v, from column `origin` on. Writes the
  // (dropped) probabilities and d(scale * q.k) as multiplicands: to s.p_rows and s.ds_rows, the latter also to s.ds;
  // zeros where keys are not seen, or not there.
  void operator()(const Strip& strip, Range c, index_t origin, const Scratch& s) const {
    const ScoreRule<Real>& rule = strip.rule;
    for (index_t t = 0; t < kRows; ++t)
      cap_scores<Target>(rule, s.scores + t * pitch_, {c.begin - origin, c.end - origin});
    const index_t begin = max_of(c.begin, min_of(round_up(strip.inner.begin, W), c.end));
    const index_t end = max_of(min_of(strip.inner.end, c.end) / W * W, begin);
    const auto all = [&](auto added, auto more) {
      walk(strip, {c.begin, begin}, origin, &strip.edges, s, added, more);
      walk(strip, {begin, end}, origin, std::nullptr_t(), s, added, more);
      walk(strip, {end, c.end}, origin, &strip.edges, s, added, more);
    };
    const bool added = addend_.columns_given();
    if (p_.dropout.active || rule.has_softcap() || rule.has_alibi())
      all(added, std::true_type());
    else if (added)
      all(std::true_type(), std::false_type());
    else
      all(std::false_type(), std::false_type());
  }

 private:
  // Rows side by side: one alone would wait for its own results. Edges: none where all is seen. Added: whether there is
  // an addend. More: whether scores may be more than products times a factor. What is known here needs no branch below.
  template <class EdgesOrNone, class Added, class More>
  void walk(const Strip& strip, Range columns, index_t origin, EdgesOrNone edges, const Scratch& s, Added added,
            More more) const {
    const ScoreRule<Real> rule = strip.rule;  // Copies, which no store can change.
    const DropoutRule dropout = p_.dropout;
    const Real *const lse = strip.lse_log2, *const delta = strip.delta;
    const index_t ld = tiles_.queries, row_addend = addend_.columns_differ() ? ld : 1;
    const bool per_query = addend_.columns_differ();
    for (index_t i = columns.begin; i < columns.end; i += W) {
      const V query = V(Real(i)) + Simd::iota(), zero = V(Real(0));
      V ds[kRows], weights[kAbreast];
      const auto row = [&](index_t t, V& weight) {
        const V capped = Simd::load(s.scores + t * pitch_ + i - origin);
        V score = capped * V(rule.factor()), dp = Simd::load(s.dp + t * pitch_ + i - origin);
        if (more)
          score = rule.logit_of_capped(capped, query + V(Real(rule.diagonal(strip.first) - strip.keys.begin - t)));
        if (added) {
          const Real* const addend = s.addend + (strip.row + t) * row_addend;
          score = score + (per_query ? Simd::load(addend + i) : V(*addend));
        }
        // No weight exceeds 1; a huge bias makes score and LSE too coarse for their difference to say so.
        V p = Format::weight(vmin(zero, score - Simd::load(lse + i)));
        const std::uint8_t* const kept = s.dropout + (strip.row + t) * ld / 8;
        if (more && dropout.active) dp = Simd::keep_where(dp, kept, i) * V(Real(dropout.keep_scale));
        ds[t] = p * (dp - Simd::load(delta + i));
        if (more && rule.has_softcap()) ds[t] = ds[t] * (V(Real(1)) - capped * capped);
        if (more && dropout.active) p = Simd::keep_where(p, kept, i);
        if constexpr (!std::is_null_pointer_v<EdgesOrNone>) {
          const V begin = V(edges->begin[t]), end = V(edges->end[t]);
          p = select_between(query, begin, end, p, zero);
          ds[t] = select_between(query, begin, end, ds[t], zero);
        }
        weight = p;
      };
      for (index_t t = 0; t < kRows; t += kAbreast) {
        each_part([&](auto part) { row(t + part, weights[part]); }, std::make_integer_sequence<int, kAbreast>());
        for (index_t n = 0; n < kAbreast; n += 2) {
          const index_t at = (t + n) * Target::kParts * ld + i;
          Format::store_rows(s.p_rows + at, ld, weights[n], weights[n + 1]);
          Format::store_rows(s.ds_rows + at, ld, ds[t + n], ds[t + n + 1]);
        }
      }
      ScoreGradients<Target>(s.ds, tiles_.keys, ld).store(strip.row, i, ds);
    }
  }

  const Problem& p_;
  const Addend<Target>& addend_;
  const Tiles tiles_;
  const index_t pitch_;  // Of scores and dp.
};

}  // namespace flash_attn::cpu
