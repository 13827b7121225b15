// All score features. Two hooks: `logit` turns a dot product q.k into a score, the visibility functions say which keys
// a query sees, by intervals, by element and by tile. Main loops of every backend know nothing else about softcap,
// ALiBi, bias, causal, windows, row bounds or masks.
//
// The hooks are templates over the number type V: a scalar on a GPU lane, a vector on the CPU. V needs + - * and the
// functions vabs and vtanh, found by argument-dependent lookup or below for scalars.
#pragma once

#include <cmath>

#include "core/platform.h"
#include "core/range.h"
#include "core/softmax.h"

namespace flash_attn {

FA_INLINE float vabs(float x) { return x < 0 ? -x : x; }
FA_INLINE double vabs(double x) { return x < 0 ? -x : x; }
FA_INLINE float vtanh(float x) { return std::tanh(x); }
FA_INLINE double vtanh(double x) { return std::tanh(x); }

enum class Cover : std::uint8_t { none, some, all };

// Query i sees keys [begin[i], end[i]) at most; either table may be missing. Entries may hold any number.
struct RowBounds {
  const std::int32_t* begin = nullptr;
  const std::int32_t* end = nullptr;
  index_t begin_stride = 0, end_stride = 0;

  FA_INLINE bool given() const { return begin != nullptr || end != nullptr; }
  FA_INLINE Range clamp(index_t i, Range keys) const {
    if (begin) keys.begin = max_of<index_t>(keys.begin, begin[i * begin_stride]);
    if (end) keys.end = min_of<index_t>(keys.end, end[i * end_stride]);
    return {keys.begin, max_of(keys.begin, keys.end)};
  }
};

// Boolean mask over (query, key), nonzero where the query may see the key. Broadcast dimensions have stride 0.
struct MaskTable {
  const std::uint8_t* data = nullptr;
  index_t row_stride = 0, key_stride = 0;

  FA_INLINE bool given() const { return data != nullptr; }
  FA_INLINE bool keeps(index_t i, index_t j) const { return data[i * row_stride + j * key_stride] != 0; }

  FA_INLINE Cover cover(Range rows, Range keys) const {
    bool any = false, all = true;
    const index_t last_row = row_stride == 0 ? rows.begin + 1 : rows.end;
    for (index_t i = rows.begin; i < last_row; ++i)
      for (index_t j = keys.begin; j < keys.end; ++j) {
        const bool kept = keeps(i, j);
        any = any || kept;
        all = all && kept;
        if (any && !all) return Cover::some;
      }
    return any ? Cover::all : Cover::none;
  }
};

// The rule of one (sequence, head). Scores come out in log2 units (see core/softmax.h).
template <class Real>
struct ScoreRule {
  Real scale_log2;       // softmax_scale * log2(e)
  Real softcap_log2;     // softcap * log2(e); 0: no softcap
  Real inverse_softcap;  // softmax_scale / softcap
  Real slope_log2;       // ALiBi slope * log2(e); 0: no ALiBi
  index_t Sq, Sk;
  index_t window_left, window_right;  // Negative: unbounded. Causal is window_right = 0.
  RowBounds bounds;
  MaskTable mask;

  FA_INLINE bool has_softcap() const { return softcap_log2 != Real(0); }
  FA_INLINE bool has_alibi() const { return slope_log2 != Real(0); }

  // Where query i stands among the keys: bottom-right alignment, the last query sees the last key.
  FA_INLINE index_t diagonal(index_t i) const { return i + Sk - Sq; }

  // dot: q.k; distance: diagonal(i) - j.
  template <class V>
  FA_INLINE V logit(V dot, V distance) const {
    V score = dot * V(scale_log2);
    if (has_softcap()) score = V(softcap_log2) * vtanh(dot * V(inverse_softcap));
    return add_alibi(score, distance);
  }

  // The second of two steps to the same score, for those who take the first over many dot products at a time: capped is
  // tanh(dot * inverse_softcap), or the dot product itself where there is no softcap.
  template <class V>
  FA_INLINE V logit_of_capped(V capped, V distance) const {
    return add_alibi(capped * V(factor()), distance);
  }
  template <class V>
  FA_INLINE V add_alibi(V score, V distance) const {
    return has_alibi() ? score - V(slope_log2) * vabs(distance) : score;
  }
  FA_INLINE Real factor() const { return has_softcap() ? softcap_log2 : scale_log2; }

  // d(score in natural units) / d(softmax_scale * dot).
  template <class V>
  FA_INLINE V slope_of_logit(V dot) const {
    if (!has_softcap()) return V(Real(1));
    const V t = vtanh(dot * V(inverse_softcap));
    return V(Real(1)) - t * t;
  }

  // Keys that query i sees, but for those that the mask hides.
  FA_INLINE Range visible_keys(index_t i) const {
    const index_t begin = window_left < 0 ? 0 : max_of<index_t>(0, diagonal(i) - window_left);
    const index_t end = window_right < 0 ? Sk : min_of(Sk, diagonal(i) + window_right + 1);
    return bounds.given() ? bounds.clamp(i, {begin, end}) : Range{begin, max_of(begin, end)};
  }
  FA_INLINE bool sees(index_t i, index_t j) const {
    const Range keys = visible_keys(i);
    return keys.begin <= j && j < keys.end && (!mask.given() || mask.keeps(i, j));
  }

  // Queries that see key j by causal and window alone: row bounds and mask may hide it from some of them.
  FA_INLINE Range visible_queries(index_t j) const {
    const index_t i = j - (Sk - Sq);  // The query whose diagonal is j.
    const index_t begin = window_right < 0 ? 0 : max_of<index_t>(0, i - window_right);
    const index_t end = window_left < 0 ? Sq : min_of(Sq, i + window_left + 1);
    return {begin, max_of(begin, end)};
  }

  // The smallest interval that holds all keys that some query of [rows.begin, rows.end) sees, mask aside.
  FA_INLINE Range visible_keys(Range rows) const {
    if (bounds.given()) return hull_of_bounds(rows);
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
    const Cover masked = mask.given() ? mask.cover(rows, keys) : Cover::all;
    if (masked != Cover::all) return masked;
    return whole(rows, keys) ? Cover::all : Cover::some;
  }

 private:
  FA_INLINE Range hull_of_bounds(Range rows) const {
    Range hull{Sk, 0};
    for (index_t i = rows.begin; i < rows.end; ++i) {
      const Range keys = visible_keys(i);
      if (keys.empty()) continue;
      hull = {min_of(hull.begin, keys.begin), max_of(hull.end, keys.end)};
    }
    return {min_of(hull.begin, hull.end), hull.end};
  }
  FA_INLINE bool whole(Range rows, Range keys) const {
    if (!bounds.given())
      return visible_keys(rows.end - 1).begin <= keys.begin && keys.end <= visible_keys(rows.begin).end;
    for (index_t i = rows.begin; i < rows.end; ++i) {
      const Range seen = visible_keys(i);
      if (seen.begin > keys.begin || seen.end < keys.end) return false;
    }
    return true;
  }
};

}  // namespace flash_attn
