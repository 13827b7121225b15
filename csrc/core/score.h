// All score features. Two hooks: `logit` turns a dot product q.k into a score, the visibility functions say which keys
// a query sees. Main loops of every backend know nothing else about softcap, ALiBi, causal or windows.
//
// The hooks are templates over the number type V: a scalar on a GPU lane, a vector on the CPU. V needs + - * and the
// functions vabs and vtanh, found by argument-dependent lookup or below for scalars.
#pragma once

#include <cmath>

#include "core/platform.h"
#include "core/softmax.h"

namespace flash_attn {

FA_INLINE float vabs(float x) { return x < 0 ? -x : x; }
FA_INLINE double vabs(double x) { return x < 0 ? -x : x; }
FA_INLINE float vtanh(float x) { return std::tanh(x); }
FA_INLINE double vtanh(double x) { return std::tanh(x); }

// Half-open interval of positions.
struct Range {
  index_t begin, end;
  FA_INLINE bool empty() const { return begin >= end; }
};

enum class Cover : std::uint8_t { none, some, all };

// The rule of one (sequence, head). Scores come out in log2 units (see core/softmax.h).
template <class Real>
struct ScoreRule {
  Real scale_log2;       // softmax_scale * log2(e)
  Real softcap_log2;     // softcap * log2(e); 0: no softcap
  Real inverse_softcap;  // softmax_scale / softcap
  Real slope_log2;       // ALiBi slope * log2(e); 0: no ALiBi
  index_t Sq, Sk;
  index_t window_left, window_right;  // Negative: unbounded. Causal is window_right = 0.

  FA_INLINE bool has_softcap() const { return softcap_log2 != Real(0); }
  FA_INLINE bool has_alibi() const { return slope_log2 != Real(0); }

  // Where query i stands among the keys: bottom-right alignment, the last query sees the last key.
  FA_INLINE index_t diagonal(index_t i) const { return i + Sk - Sq; }

  // dot: q.k; distance: diagonal(i) - j.
  template <class V>
  FA_INLINE V logit(V dot, V distance) const {
    V score = has_softcap() ? V(softcap_log2) * vtanh(dot * V(inverse_softcap)) : dot * V(scale_log2);
    if (has_alibi()) score = score - V(slope_log2) * vabs(distance);
    return score;
  }

  // d(score in natural units) / d(softmax_scale * dot).
  template <class V>
  FA_INLINE V slope_of_logit(V dot) const {
    if (!has_softcap()) return V(Real(1));
    const V t = vtanh(dot * V(inverse_softcap));
    return V(Real(1)) - t * t;
  }

  // Keys that query i sees.
  FA_INLINE Range visible_keys(index_t i) const {
    const index_t begin = window_left < 0 ? 0 : max_of<index_t>(0, diagonal(i) - window_left);
    const index_t end = window_right < 0 ? Sk : min_of(Sk, diagonal(i) + window_right + 1);
    return {begin, max_of(begin, end)};
  }

  // Queries that see key j.
  FA_INLINE Range visible_queries(index_t j) const {
    const index_t i = j - (Sk - Sq);  // The query whose diagonal is j.
    const index_t begin = window_right < 0 ? 0 : max_of<index_t>(0, i - window_right);
    const index_t end = window_left < 0 ? Sq : min_of(Sq, i + window_left + 1);
    return {begin, max_of(begin, end)};
  }

  // Keys that some query of [rows.begin, rows.end) sees.
  FA_INLINE Range visible_keys(Range rows) const {
    return {visible_keys(rows.begin).begin, visible_keys(rows.end - 1).end};
  }
  // Queries that see some key of [keys.begin, keys.end).
  FA_INLINE Range visible_queries(Range keys) const {
    return {visible_queries(keys.begin).begin, visible_queries(keys.end - 1).end};
  }

  // How much of the tile rows x keys is visible.
  FA_INLINE Cover cover(Range rows, Range keys) const {
    const Range any = visible_keys(rows);
    if (any.end <= keys.begin || any.begin >= keys.end) return Cover::none;
    const Range first = visible_keys(rows.begin), last = visible_keys(rows.end - 1);
    const bool whole = last.begin <= keys.begin && keys.end <= first.end;
    return whole ? Cover::all : Cover::some;
  }
};

}  // namespace flash_attn
