// Backward pass of few queries, which meet keys and values where these are in memory: nothing is packed.
//
// Tasks are (unit, range of keys). A few keys at a time: S = Q K^T and dP = dO V^T with the features in the lanes, P
// and dS with the keys there, dQ += dS K, and dK = dS^T Q and dV = P^T dO, which go to memory at once, as all queries
// of a key head are here. dQ of a unit's ranges is added up in their order, by whoever has finished the last of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <new>

#include "core/thread_pool.h"
#include "cpu/backward_statistics.h"
#include "cpu/direct_rows.h"
#include "cpu/few_rows.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

// out[n] = factor * sum of weights[r * kDirectKeys + n] * x[r] over the rows of x, for N keys from n on of which `left`
// are there, and M vectors of features from `at` on.
template <class Target, class T, int N, int M>
FA_INLINE void store_key_block(const typename Target::Real* weights, const typename Target::Elem* x, index_t x_stride,
                               index_t rows, index_t left, index_t at, index_t features, typename Target::Real factor,
                               char* out, index_t out_bytes) {
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  V sum[N * M];
  each_of<N * M>([&](auto i) { sum[i] = V(typename Target::Real(0)); });
  for (index_t r = 0; r < rows; ++r) {
    V row[M];
    each_of<M>([&](auto c) { row[c] = Simd::load(x + r * x_stride + at + c * Simd::W); });
    each_of<N>([&](auto n) {
      const V weight(weights[r * kDirectKeys + n]);
      each_of<M>([&](auto c) { sum[n * M + c] = fma(weight, row[c], sum[n * M + c]); });
    });
  }
  each_of<N>([&](auto n) {
    if (n >= left) return;
    T* const to = reinterpret_cast<T*>(out + n * out_bytes) + at;
    each_of<M>([&](auto c) {
      const index_t rest = features - at - c * Simd::W;
      if (rest >= Simd::W)
        Simd::store(to + c * Simd::W, sum[n * M + c] * V(factor));
      else if (rest > 0)
        Simd::store_first(to + c * Simd::W, sum[n * M + c] * V(factor), rest);
    });
  });
}

// The same for all features of `keys` keys.
template <class Target, class T>
void store_keys(const typename Target::Real* weights, const typename Target::Elem* x, index_t x_stride, index_t rows,
                index_t keys, index_t features, typename Target::Real factor, char* out, index_t out_bytes) {
  constexpr int N = 6, M = 2;  // As many accumulators as AVX2 has registers for.
  for (index_t n = 0; n < keys; n += N)
    for (index_t at = 0; at < features; at += M * Target::Simd::W)
      store_key_block<Target, T, N, M>(weights + n, x, x_stride, rows, keys - n, at, features, factor,
                                       out + n * out_bytes, out_bytes);
}

// Of multiplicands that are numbers of the accumulators' type, as gradients of scores are not rounded here.
template <class Target>
inline constexpr bool kHasBackwardDirect = !Target::kTiled && std::is_same_v<typename Target::Elem, float>;

template <class Target>
class BackwardDirect {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  static constexpr index_t kRows = Target::kRows, kPadded = round_up(kMostDirectQueries, kRows);
  // Scores of a key block are read a few keys beyond its end (store_key_block).
  static constexpr index_t kScores = kPadded * kDirectKeys + 8;

 public:
  BackwardDirect(const BackwardProblem& backward, const Sequences& sequences, const Executor& executor)
      : f_(backward),
        p_(backward.problem),
        executor_(executor),
        units_(p_, sequences),
        format_(row_format<Target>(p_.dtype)),
        products_(direct_products<Target>(p_.dtype, Asking::into_l1)),
        store_keys_(key_store(p_.dtype)),
        stride_(round_up(p_.D, Target::kPanel)),
        v_stride_(round_up(p_.Dv, Target::kPanel)),
        ranges_(most_ranges()) {}

  void run() const {
    if (units_.count() == 0) return;
    const index_t of_unit = carve_unit(nullptr).bytes, of_worker = carve(nullptr).bytes;
    const index_t wave = units_.wave(of_unit, ranges_, executor_.num_threads);
    const int workers = worker_count(executor_, wave * ranges_);
    const Workspace memory(wave * of_unit + workers * of_worker);
    for (index_t first = 0; first < units_.count(); first += wave) {
      const index_t n = min_of(wave, units_.count() - first);
      const auto unit = [&](index_t i) { return carve_unit(memory.data() + i * of_unit); };
      for (index_t i = 0; i < n; ++i) new (unit(i).left) std::atomic<index_t>(ranges_);
      parallel_for(executor_, n * ranges_, [&](index_t task, int worker) {
        const index_t range = task % ranges_;
        const Unit u = unit(task / ranges_);
        const Rows r = rows_of(first + task / ranges_);
        if (range < r.ranges)
          attend(r, range, u.dq + range * rows_held() * stride_,
                 carve(memory.data() + wave * of_unit + worker * of_worker));
        if (u.left->fetch_sub(1, std::memory_order_acq_rel) == 1) store_dq(r, u.dq);
      });
    }
  }

 private:
  // The queries of a unit, which meet so many ranges of keys.
  struct Rows {
    index_t b, h, count, ranges;
    Sequence sequence;
  };
  struct Unit {
    std::atomic<index_t>* left;  // Ranges that are not finished.
    Real* dq;                    // ranges x rows x stride
    index_t bytes;
  };
  struct Scratch {
    const void **k_rows, **v_rows;  // Addresses of a range's rows, and as many after them as are asked for.
    Elem *q, *dout;
    Real *lse_log2, *delta;
    Real *scores, *dp;  // rows x kDirectKeys: S, then P; dP, then dS
    Real* sums;         // rows x sums_stride
    index_t bytes;
  };
  using StoreKeys = void (*)(const Real*, const Elem*, index_t, index_t, index_t, index_t, Real, char*, index_t);

  static StoreKeys key_store(DType dtype) {
    if (dtype == DType::f16) return store_keys<Target, Half>;
    if (dtype == DType::bf16) return store_keys<Target, BFloat16>;
    return store_keys<Target, float>;
  }
  index_t ranges_of(index_t keys) const { return max_of<index_t>(1, ceil_div(keys, direct_range_keys(p_, keys))); }
  index_t most_ranges() const {
    index_t most = 1;
    for (index_t unit = 0; unit < units_.count(); unit += p_.Hk)
      most = max_of(most, ranges_of(p_.sequence(units_.b(unit)).k_len));
    return most;
  }
  // Keys that are met at a time: K and V of as many are in L1 when they are needed again.
  index_t tile_keys() const {
    constexpr index_t kBytes = index_t(16) << 10, kLeast = 16;
    const index_t keys = kBytes / (max_of(p_.D, p_.Dv) * format_.size) / kLeast * kLeast;
    return max_of(kLeast, min_of(keys, kDirectKeys));
  }

  Unit carve_unit(char* base) const {
    Carver c(base);
    Unit u{};
    u.left = c.take<std::atomic<index_t>>(1);
    u.dq = c.take<Real>(ranges_ * rows_held() * stride_);
    u.bytes = c.used();
    return u;
  }
  Scratch carve(char* base) const {
    Carver c(base);
    Scratch s{};
    s.k_rows = c.take<const void*>(kInPlaceKeys + kRowsAhead);
    s.v_rows = c.take<const void*>(kInPlaceKeys + kRowsAhead);
    s.q = c.take<Elem>(kPadded * stride_);
    s.dout = c.take<Elem>(kPadded * v_stride_);
    s.lse_log2 = c.take<Real>(kPadded);
    s.delta = c.take<Real>(kPadded);
    s.scores = c.take<Real>(kScores);
    s.dp = c.take<Real>(kScores);
    s.sums = c.take<Real>(kPadded * sums_stride<Target>(p_.D));
    s.bytes = c.used();
    return s;
  }

  Rows rows_of(index_t unit) const {
    const index_t b = units_.b(unit);
    const Sequence sequence = p_.sequence(b);
    return {b, units_.hk(unit), sequence.q_len, ranges_of(sequence.k_len), sequence};
  }

  void attend(const Rows& r, index_t range, Real* dq, const Scratch& s) const {
    const index_t of_range = direct_range_keys(p_, r.sequence.k_len);
    const Range keys{range * of_range, min_of((range + 1) * of_range, r.sequence.k_len)};
    std::fill_n(dq, rows_held() * stride_, Real(0));
    load_queries(r, range == 0, s);
    if (keys.empty()) return;
    addresses(p_.k, r, keys, s.k_rows);
    addresses(p_.v, r, keys, s.v_rows);
    const index_t tile = tile_keys(), count = keys.end - keys.begin;
    for (index_t n = 0; n < count; n += tile) {
      const index_t of_tile = min_of(tile, count - n);
      multiply(r, n, of_tile, s);
      weigh(r.count, of_tile, s);
      accumulate(r, n, of_tile, s);
      const index_t row = r.sequence.k_begin + keys.begin + n;
      store(f_.dv, r, row, of_tile, s.scores, s.dout, v_stride_, p_.Dv, Real(1));
      store(f_.dk, r, row, of_tile, s.dp, s.q, stride_, p_.D, Real(p_.scale));
    }
    each_strip(r, [&](index_t i, const auto& products) {
      products.add(s.sums + i * sums_stride<Target>(p_.D), p_.D, dq + i * stride_, stride_);
    });
  }

  void load_queries(const Rows& r, bool first_range, const Scratch& s) const {
    const auto load = [&](const Operand& x, index_t features, index_t stride, Elem* to) {
      load_rows<Target>(format_, row_at(x, format_.size, r.b, r.sequence.q_begin, r.h), x.row_stride * format_.size,
                        r.count, round_up(r.count, kRows), features, stride, to);
    };
    load(p_.q, p_.D, stride_, s.q);
    load(f_.dout, p_.Dv, v_stride_, s.dout);
    load_statistics(f_, format_, r.b, r.h, {0, r.count}, s.lse_log2, s.delta, first_range);
  }

  // Of the rows of a range, and of the last one again for what is asked for beyond it.
  void addresses(const Operand& x, const Rows& r, Range keys, const void** rows) const {
    const char* const first = row_at(x, format_.size, r.b, r.sequence.k_begin + keys.begin, r.h);
    const index_t count = keys.end - keys.begin;
    for (index_t n = 0; n < count + kRowsAhead; ++n)
      rows[n] = first + min_of(n, count - 1) * x.row_stride * format_.size;
  }

  // Calls work(row, products) for each strip of queries.
  template <class Work>
  FA_INLINE void each_strip(const Rows& r, const Work& work) const {
    for (index_t i = 0; i < r.count; i += kRows) work(i, products_.of(r.count - i));
  }

  // S and dP of `count` keys from the n-th of a range on. While rows of K are read those of V are asked for, and so on.
  void multiply(const Rows& r, index_t n, index_t count, const Scratch& s) const {
    const index_t of_k = p_.D * format_.size, of_v = p_.Dv * format_.size;
    const DirectRows k{s.k_rows + n, 0, {s.v_rows + n, 0, of_v}}, v{s.v_rows + n, 0, {s.k_rows + n + count, 0, of_k}};
    each_strip(r, [&](index_t i, const auto& products) {
      products.dots(s.q + i * stride_, stride_, p_.D, k, 0, count, s.scores + i * kDirectKeys);
    });
    each_strip(r, [&](index_t i, const auto& products) {
      products.dots(s.dout + i * v_stride_, v_stride_, p_.Dv, v, 0, count, s.dp + i * kDirectKeys);
    });
  }

  // P and dS in place.
  void weigh(index_t rows, index_t count, const Scratch& s) const {
    const V factor(Real(p_.scale * kLog2e)), zero(Real(0));
    for (index_t i = 0; i < rows; ++i) {
      Real *const scores = s.scores + i * kDirectKeys, *const dp = s.dp + i * kDirectKeys;
      const V lse(s.lse_log2[i]), delta(s.delta[i]);
      for (index_t n = 0; n < count; n += Simd::W) {
        // No weight exceeds 1, as in blocks.
        const V p = Target::Format::weight(vmin(zero, Simd::load(scores + n) * factor - lse));
        Simd::store(scores + n, p);
        Simd::store(dp + n, p * (Simd::load(dp + n) - delta));
      }
    }
  }

  void accumulate(const Rows& r, index_t n, index_t count, const Scratch& s) const {
    const DirectRows k{s.k_rows + n, 0, {s.v_rows + n + count, 0, p_.Dv * format_.size}};
    each_strip(r, [&](index_t i, const auto& products) {
      products.accumulate(s.dp + i * kDirectKeys, k, 0, count, p_.D, s.sums + i * sums_stride<Target>(p_.D), n == 0);
    });
  }

  void store(const Operand& x, const Rows& r, index_t row, index_t count, const Real* weights, const Elem* queries,
             index_t stride, index_t features, Real factor) const {
    store_keys_(weights, queries, stride, r.count, count, features, factor, row_at(x, format_.size, r.b, row, r.h),
                x.row_stride * format_.size);
  }

  // The sum of what ranges have for dq.
  void store_dq(const Rows& r, Real* dq) const {
    for (index_t range = 1; range < r.ranges; ++range)
      for (index_t n = 0; n < r.count * stride_; n += Simd::W) {
        const Real* const more = dq + range * rows_held() * stride_;
        Simd::store(dq + n, Simd::load(dq + n) + Simd::load(more + n));
      }
    for (index_t i = 0; i < r.count; ++i)
      format_.store(dq + i * stride_, Real(p_.scale), p_.D,
                    row_at(f_.dq, format_.size, r.b, r.sequence.q_begin + i, r.h));
  }

  index_t rows_held() const { return round_up(units_.longest_q(), kRows); }

  const BackwardProblem& f_;
  const Problem& p_;
  const Executor& executor_;
  const Units units_;
  const RowFormat<Target> format_;
  const DirectProducts<Target> products_;
  const StoreKeys store_keys_;
  const index_t stride_, v_stride_;
  const index_t ranges_;
};

}  // namespace flash_attn::cpu
