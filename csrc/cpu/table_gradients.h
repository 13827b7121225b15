// Gradients of the sink and of the additive bias.
//
// The latter is dS, summed over the dimensions in which the bias is broadcast. Stationary in tiles of the bias: a task
// owns some rows and keys of it and walks, in a fixed order, every (sequence, head, query block) that reads them,
// recomputing S and dP. That costs two more products than adding up inside the backward pass; in return there are no
// atomics, no copies of the bias per thread, and one order of sums.
#pragma once

#include "core/thread_pool.h"
#include "cpu/capped_scores.h"
#include "cpu/dropout_bits.h"
#include "cpu/score_tables.h"
#include "cpu/target.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

// The sink's weight times what its value 0 lacks of the row's mean, summed over rows in their order.
template <class Target>
void sink_gradient(const BackwardProblem& f, const Executor& executor) {
  using Real = typename Target::Real;
  const Problem& p = f.problem;
  parallel_for(executor, p.H, [&](index_t h, int) {
    const double sink = double(sink_log2<Target>(p, h));
    double sum = 0.0;
    for (index_t b = 0; b < p.B; ++b) {
      const index_t first = p.lse_offset(b, h);
      for (index_t i = first; i < first + p.sequence(b).q_len; ++i) {
        const double lse = double(static_cast<const Real*>(f.lse)[i]);
        if (!std::isinf(lse))
          sum -= std::exp2(min_of(sink - lse * kLog2e, 0.0)) * double(static_cast<const Real*>(f.softmax_d)[i]);
      }
    }
    const Real value = Real(sum);
    table_format<Target>(p.sink_dtype)
        .store(&value, Real(1), 1, static_cast<char*>(f.dsink) + h * size_of(p.sink_dtype));
  });
}

template <class Target>
class BiasGradient {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  static constexpr index_t W = Simd::W, kStep = Target::Format::kStep, kRows = Target::kRows, kWidth = Target::kWidth;
  static constexpr index_t kQueries = round_up(48, kRows);
  // Terms that make up one sum. These are added in double, as a bias for all heads and queries has millions of terms.
  static constexpr index_t kTerms = kQueries;

 public:
  /// The backward pass has written softmax_d.
  BiasGradient(const BackwardProblem& backward, const Executor& executor)
      : f_(backward),
        p_(backward.problem),
        executor_(executor),
        format_(row_format<Target>(p_.dtype)),
        bias_format_(table_format<Target>(p_.bias.dtype)),
        addend_(p_),
        keys_(backward_tiles(p_.D, p_.Dv, Target::kSize, Target::kRows, true).keys),
        depth_(round_up(p_.D, Target::kDepth)),
        v_depth_(round_up(p_.Dv, Target::kDepth)),
        stride_(Target::kParts * round_up(p_.D, kWidth)),
        v_stride_(Target::kParts * round_up(p_.Dv, kWidth)) {}

  void run() {
    const ScoreTable& d = f_.dbias;
    const index_t batches = d.batch_stride ? p_.B : 1, heads = d.head_stride ? p_.H : 1;
    const index_t row_blocks = d.row_stride ? ceil_div(p_.Sq, kQueries) : 1, key_blocks = ceil_div(p_.Sk, keys_);
    const index_t tasks = batches * heads * row_blocks * key_blocks, bytes = carve(nullptr).bytes;
    const Workspace memory(worker_count(executor_, tasks) * bytes);
    parallel_for(executor_, tasks, [&](index_t task, int worker) {
      const index_t kb = task % key_blocks, rb = task / key_blocks % row_blocks;
      const index_t table = task / key_blocks / row_blocks;
      tile(table / heads, table % heads, rb, {kb * keys_, min_of((kb + 1) * keys_, p_.Sk)},
           carve(memory.data() + worker * bytes));
    });
  }

 private:
  struct Scratch {
    Elem *rows, *k, *v;     // keys x the larger stride; K^T and V^T packed
    Elem *q, *dout;         // kQueries x stride, kQueries x v_stride
    Real *scores, *dp;      // kRows x keys
    Real *addend, *sum;     // keys; kQueries x keys
    double* total;          // kQueries x keys
    std::uint8_t* dropout;  // a bit each: keys, rounded up to 256
    index_t bytes;
  };
  Scratch carve(char* base) const {
    Carver c(base);
    Scratch s{};
    s.rows = c.take<Elem>(keys_ * max_of(stride_, v_stride_));
    s.k = c.take<Elem>(keys_ * Target::kParts * depth_);
    s.v = c.take<Elem>(keys_ * Target::kParts * v_depth_);
    s.q = c.take<Elem>(kQueries * stride_);
    s.dout = c.take<Elem>(kQueries * v_stride_);
    s.scores = c.take<Real>(kRows * keys_);
    s.dp = c.take<Real>(kRows * keys_);
    s.addend = c.take<Real>(keys_);
    s.sum = c.take<Real>(kQueries * keys_);
    s.total = c.take<double>(kQueries * keys_);
    s.dropout = c.take<std::uint8_t>(round_up(keys_, 256) / 8);
    s.bytes = c.used();
    return s;
  }

  // One (sequence, head) whose scores read the tile.
  struct Reader {
    index_t b, h;
    Sequence sequence;
    ScoreRule<Real> rule;
    Range keys;  // Those of the tile that the sequence has.
  };

  void tile(index_t table_b, index_t table_h, index_t row_block, Range keys, const Scratch& s) const {
    const ScoreTable& d = f_.dbias;
    const index_t rows = d.row_stride ? min_of(kQueries, p_.Sq - row_block * kQueries) : 1;
    [[maybe_unused]] const typename Target::Tiles::Session session;
    fill(s.sum, 0, kQueries * keys_, Real(0));
    index_t terms = 0;
    bool joined = false;
    const Range bs{d.batch_stride ? table_b : 0, d.batch_stride ? table_b + 1 : p_.B};
    const Range hs{d.head_stride ? table_h : 0, d.head_stride ? table_h + 1 : p_.H};
    for (index_t b = bs.begin; b < bs.end; ++b)
      for (index_t h = hs.begin; h < hs.end; ++h) {
        const Sequence sequence = p_.sequence(b);
        const Reader r{b, h, sequence, p_.score_rule<Real>(b, h), {keys.begin, min_of(keys.end, sequence.k_len)}};
        if (r.keys.empty()) continue;
        if (h == hs.begin || h % p_.group() == 0) pack_keys(r, s);
        for (index_t first = row_block * kQueries; first < sequence.q_len; first += kQueries) {
          if (terms >= kTerms) {
            join_total(rows, joined, s);
            joined = true, terms = 0;
          }
          queries(r, first, s);
          terms += d.row_stride ? 1 : kQueries;
          if (d.row_stride) break;
        }
      }
    if (joined) {
      join_total(rows, joined, s);
      for (index_t n = 0; n < rows * keys_; ++n) s.sum[n] = Real(s.total[n]);
    }
    const index_t size = size_of(d.dtype);
    for (index_t r = 0; r < rows; ++r) {
      const index_t at =
          table_b * d.batch_stride + table_h * d.head_stride + (row_block * kQueries + r) * d.row_stride + keys.begin;
      bias_format_.store(s.sum + r * keys_, Real(1), keys.end - keys.begin, static_cast<char*>(d.data) + at * size);
    }
  }

  // Joined: there is a total already.
  void join_total(index_t rows, bool joined, const Scratch& s) const {
    for (index_t n = 0; n < rows * keys_; ++n) {
      s.total[n] = (joined ? s.total[n] : 0.0) + double(s.sum[n]);
      s.sum[n] = Real(0);
    }
  }

  void pack_keys(const Reader& r, const Scratch& s) const {
    const index_t n = r.keys.end - r.keys.begin, padded = round_up(n, kWidth), hk = r.h / p_.group();
    const index_t row = r.sequence.k_begin + r.keys.begin;
    load_rows(format_, row_at(p_.k, format_.size, r.b, row, hk), p_.k.row_stride * format_.size, n, padded, p_.D,
              stride_, s.rows);
    pack_transposed<Target>(s.rows, stride_, {s.k, Target::kParts * depth_, padded});
    load_rows(format_, row_at(p_.v, format_.size, r.b, row, hk), p_.v.row_stride * format_.size, n, padded, p_.Dv,
              v_stride_, s.rows);
    pack_transposed<Target>(s.rows, v_stride_, {s.v, Target::kParts * v_depth_, padded});
  }

  void queries(const Reader& r, index_t first, const Scratch& s) const {
    const index_t rows = min_of(kQueries, r.sequence.q_len - first);
    if (r.rule.cover({first, first + rows}, r.keys) == Cover::none) return;
    const index_t padded = round_up(r.keys.end - r.keys.begin, kWidth), row = r.sequence.q_begin + first;
    load_rows(format_, row_at(p_.q, format_.size, r.b, row, r.h), p_.q.row_stride * format_.size, rows, kQueries, p_.D,
              stride_, s.q);
    load_rows(format_, row_at(f_.dout, format_.size, r.b, row, r.h), f_.dout.row_stride * format_.size, rows, kQueries,
              p_.Dv, v_stride_, s.dout);
    for (index_t n = 0; n < rows; n += kRows) {
      multiply_strip<Target, false>({s.q + n * stride_, stride_, kStep}, {s.k, Target::kParts * depth_, padded}, 0,
                                    depth_, 0, padded, s.scores, keys_);
      multiply_strip<Target, false>({s.dout + n * v_stride_, v_stride_, kStep},
                                    {s.v, Target::kParts * v_depth_, padded}, 0, v_depth_, 0, padded, s.dp, keys_);
      for (index_t t = n; t < min_of(n + kRows, rows); ++t)
        add_row(r, first + t, s.scores + (t - n) * keys_, s.dp + (t - n) * keys_, s,
                s.sum + (f_.dbias.row_stride ? t : 0) * keys_);
    }
  }

  // sum += dS of query i; x holds q.k, y holds dout.v.
  void add_row(const Reader& r, index_t i, Real* x, Real* y, const Scratch& s, Real* sum) const {
    const index_t n = r.keys.end - r.keys.begin, padded = round_up(n, kWidth);
    const DropoutRule& dropout = p_.dropout;
    addend_.row(r.rule, r.b, r.h, i, {i + kRows < r.sequence.q_len ? kRows : 0}, r.keys, s.addend);
    if (dropout.active) dropout_row<Simd, Target>(dropout, r.b, r.h, i, r.keys.begin, padded, s.dropout);
    const index_t at = p_.lse_offset(r.b, r.h) + i;
    const Real lse = static_cast<const Real*>(f_.lse)[at];
    if (std::isinf(lse)) return;  // A row that sees no key.
    const V lse_log2 = V(lse * Real(kLog2e)), delta = V(static_cast<const Real*>(f_.softmax_d)[at]);
    cap_scores<Target>(r.rule, x, {0, padded});
    V distance = V(Real(r.rule.diagonal(i) - r.keys.begin)) - Simd::iota();
    for (index_t c = 0; c < padded; c += W, distance = distance - V(Real(W))) {
      const V score = r.rule.logit_of_capped(Simd::load(x + c), distance) + Simd::load(s.addend + c);
      V dp = Simd::load(y + c);
      if (dropout.active) dp = Simd::keep_where(dp, s.dropout, c) * V(Real(dropout.keep_scale));
      Simd::store(y + c, softmax_weight(vmin(V(Real(0)), score - lse_log2)) * (dp - delta));
    }
    const Range seen = r.rule.visible_keys(i);
    const index_t begin = min_of(max_of<index_t>(seen.begin - r.keys.begin, 0), n);
    const index_t end = max_of(min_of(seen.end - r.keys.begin, n), begin);
    for (index_t c = begin; c < end; ++c) sum[c] += y[c];
  }

  const BackwardProblem& f_;
  const Problem& p_;
  const Executor& executor_;
  const RowFormat<Target> format_;
  const TableFormat<Target> bias_format_;
  const Addend<Target> addend_;
  const index_t keys_, depth_, v_depth_, stride_, v_stride_;
};

}  // namespace flash_attn::cpu
