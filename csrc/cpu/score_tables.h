// Reading the tables that belong to scores: bias, mask, row bounds and sink.
#pragma once

#include <limits>

#include "core/problem.h"
#include "core/softmax.h"
#include "cpu/cpuid.h"
#include "cpu/pack.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

// A tensor's dtype to accumulator precision and back, whatever the kernel's own dtype is.
template <class Target>
struct TableFormat {
  using Real = typename Target::Real;
  void (*load)(const void* source, index_t n, Real* out);
  void (*store)(const Real* row, Real factor, index_t n, void* out);
};

template <class Target>
TableFormat<Target> table_format(DType dtype) {
  if constexpr (std::is_same_v<typename Target::Real, double>) {
    if (dtype == DType::f64) return {RowsOf<Target, double>::load_real, RowsOf<Target, double>::store};
  } else {
    if (dtype == DType::f16) return {RowsOf<Target, Half>::load_real, RowsOf<Target, Half>::store};
    if (dtype == DType::bf16) return {RowsOf<Target, BFloat16>::load_real, RowsOf<Target, BFloat16>::store};
  }
  return {RowsOf<Target, float>::load_real, RowsOf<Target, float>::store};
}

// A bias below this masks, as -inf does: an LSE made of such scores could not be recomputed from in backward.
inline constexpr double kMaskingBias = -1e30;

// Whether queries of a head have rows of their own of what is added to scores, as with a dense bias and not with a
// key-padding mask.
inline bool has_rows(const ScoreTable& x) { return x.given() && x.row_stride != 0; }
inline bool has_bounds(const Problem& p) { return p.key_begin.data || p.key_end.data; }
inline bool addend_per_query(const Problem& p) { return has_rows(p.bias) || has_rows(p.mask) || has_bounds(p); }
// Whether blocks of queries begin with the first key, whichever queries they hold: bounds of rows come in any order.
FA_INLINE bool sees_first_keys(const Problem& p) { return p.window_left < 0 && !has_bounds(p); }
// Whether no row's scores take more than a softcap and a factor, but for what causal and window hide.
FA_INLINE bool has_plain_scores(const Problem& p) {
  return !p.bias.given() && !p.mask.given() && !p.alibi_slopes && !has_bounds(p) && float(p.scale * kLog2e) > 0;
}

// What is added to the scores in log2 units: the bias, and -inf where the mask hides a key.
template <class Target>
class Addend {
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  static constexpr index_t W = Simd::W;
  static constexpr Real kHidden = -std::numeric_limits<Real>::infinity();

 public:
  FA_INLINE explicit Addend(const Problem& p)
      : p_(p), load_(bias_loader(p.bias.dtype)), element_(size_of(p.bias.dtype)) {}

  FA_INLINE bool given() const { return p_.bias.given() || p_.mask.given(); }

  // Whether its rows differ.
  FA_INLINE bool per_query() const { return has_rows(p_.bias) || has_rows(p_.mask); }

  // Whether all that is added is a bias of T.
  template <class T>
  FA_INLINE bool is_bias_of() const {
    return p_.bias.given() && !p_.mask.given() && load_ == load_bias<T>;
  }
  // Bias of query i and the keys from `key` on, where it is.
  template <class T>
  FA_INLINE const T* bias_row(index_t b, index_t h, index_t i, index_t key) const {
    return static_cast<const T*>(p_.bias.data) + bias_at(b, h, i, key);
  }
  // x in log2 units and the bias of W keys.
  template <class T>
  static FA_INLINE V add_bias(V x, const T* bias) {
    const V y = Simd::load(bias);
    return unless_masking(y, fma(y, V(Real(kLog2e)), x));
  }

  // The same of `columns`, which takes in row bounds.
  FA_INLINE bool columns_given() const { return given() || has_bounds(p_); }
  FA_INLINE bool columns_differ() const { return addend_per_query(p_); }

  // What will be asked for soon, from what is asked for now: that many queries and keys further on.
  struct Ahead {
    index_t queries = 0, keys = 0;
  };

  // out[n] belongs to key keys.begin + n of query i of (b, h). Whole vectors are written; what is past the keys is not
  // to be used.
  void row(const ScoreRule<Real>& rule, index_t b, index_t h, index_t i, Ahead ahead, Range keys, Real* out) const {
    const index_t n = keys.end - keys.begin;
    const ScoreTable& bias = p_.bias;
    if (bias.given()) {
      const char* const source = static_cast<const char*>(bias.data) + bias_at(b, h, i, keys.begin) * element_;
      load_(source, n, out);
      // Rows lie too far apart for the processor to foresee the next one.
      const index_t further = (ahead.queries * bias.row_stride + ahead.keys) * element_;
      if (further != 0) prefetch_row_for_later(into_l2_, source + further, n * element_);
    } else {
      fill(out, 0, round_up(n, W), Real(0));
    }
    if (!rule.mask.given()) return;
    const index_t step = rule.mask.key_stride;
    const std::uint8_t* const kept = rule.mask.data + i * rule.mask.row_stride + keys.begin * step;
    for (index_t c = 0; c < n; c += W) {
      std::uint8_t lanes[W] = {};
      const bool in_place = step == 1 && c + W <= n;
      for (index_t k = c; !in_place && k < min_of(c + W, n); ++k) lanes[k - c] = kept[k * step];
      Simd::store(out + c, Simd::hide_where_zero(Simd::load(out + c), in_place ? kept + c : lanes));
    }
  }

  // The same with what row bounds hide, for kernels that walk queries and cannot cut intervals of keys:
  // out[(j - keys.begin) * stride + i - queries.begin], again in whole vectors. `rows` holds W rows of the keys, each
  // of whole vectors.
  void columns(const ScoreRule<Real>& rule, index_t b, index_t h, Range queries, Range keys, Real* rows, Real* out,
               index_t stride) const {
    const index_t n = keys.end - keys.begin, length = round_up(n, W);
    for (index_t i = queries.begin; i < queries.end; i += W) {
      for (index_t t = 0; t < W; ++t) {
        Real* const to = rows + t * length;
        if (i + t >= queries.end) {
          fill(to, 0, length, Real(0));
          continue;
        }
        row(rule, b, h, i + t, {i + t + W < queries.end ? W : 0}, keys, to);
        const Range seen = rule.visible_keys(i + t);
        const index_t begin = min_of(max_of<index_t>(seen.begin - keys.begin, 0), n);
        fill(to, 0, begin, kHidden);
        fill(to, max_of(min_of(seen.end - keys.begin, n), begin), n, kHidden);
      }
      // A last block of keys that is not whole is transposed beside out: more rows of out than keys may not exist.
      for (index_t c = 0; c < n; c += W) {
        Real block[W * W];
        const bool whole = c + W <= n;
        Real* const to = out + c * stride + i - queries.begin;
        Simd::transpose(rows + c, length, whole ? to : block, whole ? stride : W);
        for (index_t k = 0; !whole && c + k < n; ++k) Simd::store(to + k * stride, Simd::load(block + k * W));
      }
    }
  }

 private:
  using Load = void (*)(const void* source, index_t n, Real* out);

  // Elements from the first one to that of query i and key `key`.
  FA_INLINE index_t bias_at(index_t b, index_t h, index_t i, index_t key) const {
    return b * p_.bias.batch_stride + h * p_.bias.head_stride + i * p_.bias.row_stride + key;
  }
  // x, or minus infinity where the bias masks.
  static FA_INLINE V unless_masking(V bias, V x) { return select_less(bias, V(Real(kMaskingBias)), V(kHidden), x); }

  template <class T>
  static void load_bias(const void* source, index_t n, Real* out) {
    const T* const in = static_cast<const T*>(source);
    const auto convert = [](const T* from, Real* to) {
      const V x = Simd::load(from);
      Simd::store(to, unless_masking(x, x * V(Real(kLog2e))));
    };
    index_t c = 0;
    for (; c + W <= n; c += W) convert(in + c, out + c);
    if (c == n) return;
    T last[W] = {};
    for (index_t k = c; k < n; ++k) last[k - c] = in[k];
    convert(last, out + c);
  }
  static Load bias_loader(DType dtype) {
    if constexpr (std::is_same_v<Real, double>) {
      if (dtype == DType::f64) return load_bias<double>;
    } else {
      if (dtype == DType::f16) return load_bias<Half>;
      if (dtype == DType::bf16) return load_bias<BFloat16>;
    }
    return load_bias<float>;
  }

  const Problem& p_;
  const Load load_;
  const index_t element_;
  const bool into_l2_ = prefetches_into_l2();
};

// The sink's logit of a head in log2 units.
template <class Target>
typename Target::Real sink_log2(const Problem& p, index_t h) {
  typename Target::Real value;
  table_format<Target>(p.sink_dtype).load(static_cast<const char*>(p.sink) + h * size_of(p.sink_dtype), 1, &value);
  return value * typename Target::Real(kLog2e);
}

}  // namespace flash_attn::cpu
