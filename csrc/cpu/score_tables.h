// Reading the tables that belong to scores: bias, mask, row bounds and sink.
#pragma once

#include <limits>

#include "core/problem.h"
#include "core/softmax.h"
#include "cpu/pack.h"

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

// What is added to the scores in log2 units: the bias, and -inf where the mask hides a key.
template <class Target>
class Addend {
  using Real = typename Target::Real;
  static constexpr Real kHidden = -std::numeric_limits<Real>::infinity();

 public:
  FA_INLINE explicit Addend(const Problem& p)
      : p_(p), load_(table_format<Target>(p.bias.dtype).load), element_(size_of(p.bias.dtype)) {}

  FA_INLINE bool given() const { return p_.bias.given() || p_.mask.given(); }

  // out[n] belongs to key keys.begin + n of query i of (b, h).
  void row(const ScoreRule<Real>& rule, index_t b, index_t h, index_t i, Range keys, Real* out) const {
    const index_t n = keys.end - keys.begin;
    const ScoreTable& bias = p_.bias;
    if (bias.given()) {
      const index_t at = b * bias.batch_stride + h * bias.head_stride + i * bias.row_stride + keys.begin;
      load_(static_cast<const char*>(bias.data) + at * element_, n, out);
      for (index_t c = 0; c < n; ++c) out[c] = out[c] < Real(kMaskingBias) ? kHidden : out[c] * Real(kLog2e);
    } else {
      for (index_t c = 0; c < n; ++c) out[c] = Real(0);
    }
    if (!rule.mask.given()) return;
    const std::uint8_t* const kept = rule.mask.data + i * rule.mask.row_stride + keys.begin * rule.mask.key_stride;
    const index_t step = rule.mask.key_stride;
    for (index_t c = 0; c < n; ++c) out[c] = kept[c * step] ? out[c] : kHidden;
  }

  // The same with what row bounds hide, for kernels that walk queries and cannot cut intervals of keys:
  // out[(j - keys.begin) * stride + i - queries.begin]. `row_buffer` holds one row of the keys.
  void columns(const ScoreRule<Real>& rule, index_t b, index_t h, Range queries, Range keys, Real* row_buffer,
               Real* out, index_t stride) const {
    const index_t n = keys.end - keys.begin;
    for (index_t i = queries.begin; i < queries.end; ++i) {
      row(rule, b, h, i, keys, row_buffer);
      const Range seen = rule.visible_keys(i);
      Real* const to = out + i - queries.begin;
      for (index_t c = 0; c < n; ++c) {
        const index_t j = keys.begin + c;
        to[c * stride] = seen.begin <= j && j < seen.end ? row_buffer[c] : kHidden;
      }
    }
  }

 private:
  const Problem& p_;
  void (*load_)(const void*, index_t, Real*);
  index_t element_;
};

// The sink's logit of a head in log2 units.
template <class Target>
typename Target::Real sink_log2(const Problem& p, index_t h) {
  typename Target::Real value;
  table_format<Target>(p.sink_dtype).load(static_cast<const char*>(p.sink) + h * size_of(p.sink_dtype), 1, &value);
  return value * typename Target::Real(kLog2e);
}

}  // namespace flash_attn::cpu
