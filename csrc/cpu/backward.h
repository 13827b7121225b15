// Backward pass on the CPU: FlashAttention-2, Algorithm 2, stationary in dK and dV.
//
// A wave of (b, hk) units runs tasks of (unit, key block). A task walks the query heads of the group and their query
// blocks, last to first, packing Q and dO of those that no task has met before, and strip by strip of kRows keys: S^T =
// K Q^T and dP^T = V dO^T with queries in the lanes, element-wise P^T and dS^T, dV += P^T dO, dK += dS^T Q; then dQ +=
// dS K for the whole query block.
//
// dQ rows are shared by key blocks. They are added in the order of the key blocks, by turns, so the sum never depends
// on threads; tasks are handed out in that order, so whoever is waited for is running. No gradient uses atomics.
#pragma once

#include <new>

#include "core/thread_pool.h"
#include "cpu/backward_gradients.h"
#include "cpu/dropout_bits.h"
#include "cpu/pack.h"
#include "cpu/slots.h"
#include "cpu/target.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

template <class Target>
class Backward {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  static constexpr index_t W = Simd::W, kStep = Target::Format::kStep, kRows = Target::kRows;
  static constexpr index_t kDepth = Target::kDepth, kWidth = Target::kWidth, kCut = kDepthCut<Target>;
  using QueryBlock = BackwardBlock<Target>;
  using Scratch = BackwardScratch<Target>;
  using State = BackwardBlockState<Target>;
  using Worker = BackwardWorker<Target>;
  static constexpr bool kInPlace = std::is_same_v<Elem, Real>;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  Backward(const BackwardProblem& backward, const Executor& executor)
      : f_(backward),
        p_(backward.problem),
        executor_(executor),
        format_(row_format<Target>(p_.dtype)),
        units_(p_),
        addend_(p_),
        tiles_(tiles_for(units_.longest_q())),
        gradients_(p_, addend_, tiles_),
        pitch_(gradient_pitch<Target>(tiles_)),
        depth_(round_up(p_.D, kDepth)),
        v_depth_(round_up(p_.Dv, kDepth)),
        stride_(round_up(p_.D, kWidth)),
        v_stride_(round_up(p_.Dv, kWidth)),
        query_blocks_(ceil_div(units_.longest_q(), tiles_.queries)),
        key_blocks_(ceil_div(units_.longest_k(), tiles_.keys)),
        block_bytes_(carve_block(nullptr).bytes) {}

  void run() {
    const index_t q_end = p_.varlen ? p_.cu_seqlens_q[p_.B] : 0, k_end = p_.varlen ? p_.cu_seqlens_k[p_.B] : 0;
    clear_slack_rows(p_, f_.dq, q_end, p_.Tq, p_.H, p_.D);
    clear_slack_rows(p_, f_.dk, k_end, p_.Tk, p_.Hk, p_.D);
    clear_slack_rows(p_, f_.dv, k_end, p_.Tk, p_.Hk, p_.Dv);
    fill_slack_lse(p_, static_cast<Real*>(f_.softmax_d), Real(0));

    const index_t per_unit = p_.group() * query_blocks_, threads = executor_.num_threads;
    // Workers on units of their own hold one unit each at a time, whatever the number of units.
    const bool one_each = units_.count() >= threads && Units::quick_to_allocate(threads * per_unit * block_bytes_);
    const index_t wave = one_each ? units_.count() : units_.wave(per_unit * block_bytes_, key_blocks_, threads);
    const int workers = worker_count(executor_, wave * max_of(per_unit, key_blocks_));
    const index_t blocks = (one_each ? threads : wave) * per_unit, scratch_bytes = carve_scratch(nullptr).bytes;
    const index_t packed_bytes = blocks * block_bytes_, all_bytes = packed_bytes + workers * scratch_bytes;
    const Workspace memory(all_bytes + wave * per_unit * index_t(sizeof(State)));
    State* const states = reinterpret_cast<State*>(memory.data() + all_bytes);
    Slots slots(blocks, workers);
    const auto worker_of = [&](int i) {
      return Worker{i, slots, memory.data(), carve_scratch(memory.data() + packed_bytes + i * scratch_bytes)};
    };

    for (index_t first = 0; first < units_.count(); first += wave) {
      const index_t n = min_of(wave, units_.count() - first);
      for (index_t i = 0; i < n * per_unit; ++i) new (states + i) State;
      // Each worker on units of its own: neighbours in time then do not wait for each other's dQ, and what is in work
      // at a time stays in the cache. With fewer units, these side by side.
      const bool own = n >= workers;
      parallel_for_groups(executor_, own ? n : 1, own ? key_blocks_ : n * key_blocks_, [&](index_t task, int worker) {
        const index_t unit = own ? task / key_blocks_ : task % n, kb = own ? task % key_blocks_ : task / n;
        key_block(first + unit, kb, states + unit * per_unit, worker_of(worker));
      });
      parallel_for(executor_, n * per_unit, [&](index_t task, int worker) {
        const index_t in_unit = task % per_unit;
        Rows r{};
        if (rows_of(first + task / per_unit, in_unit / query_blocks_, in_unit % query_blocks_, r) && r.keys.empty())
          rows_without_keys(r, worker_of(worker));
      });
    }
  }

 private:
  Tiles tiles_for(index_t longest_q) const {
    Tiles t = backward_tiles(p_.D, p_.Dv, sizeof(Elem), kRows, addend_per_query(p_));
    t.queries = min_of(t.queries, round_up(max_of<index_t>(longest_q, 1), kKeyAlign));
    return t;
  }

  QueryBlock carve_block(char* base) const {
    Carver c(base);
    QueryBlock q{};
    const index_t n = tiles_.queries;
    q.q_transposed = c.take<Elem>(n * depth_);
    q.dout_transposed = c.take<Elem>(n * v_depth_);
    q.q_direct = c.take<Elem>(n * stride_);
    q.dout_direct = c.take<Elem>(n * v_stride_);
    q.lse_log2 = c.take<Real>(n);
    q.delta = c.take<Real>(n);
    q.dq = c.take<Real>(round_up(n, kRows) * stride_);
    q.bytes = c.used();
    return q;
  }
  Scratch carve_scratch(char* base) const {
    Carver c(base);
    Scratch s{};
    const index_t keys = round_up(tiles_.keys, kRows), queries = tiles_.queries;
    s.staging = c.take<Elem>(Panels<Target>::kPanel * max_of(stride_, v_stride_));
    s.k = c.take<Elem>(keys * stride_);
    s.v = c.take<Elem>(keys * v_stride_);
    s.k_direct = c.take<Elem>(keys * stride_);
    s.dk = c.take<Real>(keys * stride_);
    s.dv = c.take<Real>(keys * v_stride_);
    s.scores = c.take<Real>(kRows * pitch_);
    s.dp = c.take<Real>(kRows * pitch_);
    s.p_rows = kInPlace ? reinterpret_cast<Elem*>(s.scores) : c.take<Elem>(kRows * queries);
    s.ds_rows = kInPlace ? reinterpret_cast<Elem*>(s.dp) : c.take<Elem>(kRows * queries);
    s.ds = c.take<Elem>(ScoreGradients<Target>::elems(keys, queries));
    s.dropout = c.take<std::uint8_t>(round_up(tiles_.keys, 64) * queries / 8);
    s.addend = addend_.columns_given() ? c.take<Real>(tiles_.keys * (addend_.columns_differ() ? queries : 1)) : nullptr;
    s.addend_rows = c.take<Real>(addend_.columns_differ() ? W * tiles_.keys : 0);
    s.bytes = c.used();
    return s;
  }

  // A query block as a task sees it.
  struct Rows {
    index_t b, h, first, count;
    Sequence sequence;
    ScoreRule<Real> rule;
    Range keys;  // Seen by some of its queries.
  };
  bool rows_of(index_t unit, index_t g, index_t query_block, Rows& r) const {
    r.b = units_.b(unit);
    r.h = units_.hk(unit) * p_.group() + g;
    r.sequence = p_.sequence(r.b);
    r.first = query_block * tiles_.queries;
    if (r.first >= r.sequence.q_len) return false;
    r.count = min_of(tiles_.queries, r.sequence.q_len - r.first);
    r.rule = p_.score_rule<Real>(r.b, r.h);
    r.keys = r.rule.visible_keys(Range{r.first, r.first + r.count});
    return true;
  }

  // The key blocks that some of its queries see.
  Range key_blocks_of(const Rows& r) const { return {r.keys.begin / tiles_.keys, ceil_div(r.keys.end, tiles_.keys)}; }

  void pack(const Rows& r, const QueryBlock& q, const Scratch& s) const {
    const index_t padded = round_up(r.count, kWidth);
    pack_both_ways(r, f_.dout, p_.Dv, {q.dout_transposed, v_depth_, padded}, {q.dout_direct, padded, v_stride_}, s);
    load_statistics(r, q);
    pack_both_ways(r, p_.q, p_.D, {q.q_transposed, depth_, padded}, {q.q_direct, padded, stride_}, s);
  }

  // Rows of q or dout with queries in the lanes and with features in the lanes, panel by panel of the former, so that
  // they come from L1 the second time.
  void pack_both_ways(const Rows& r, const Operand& x, index_t features, const Panels<Target>& transposed,
                      const Panels<Target>& direct, const Scratch& s) const {
    for (index_t panel = 0; panel < transposed.count(); ++panel) {
      const index_t begin = transposed.begin(panel), width = transposed.width(panel), left = r.count - begin;
      const char* const source = row_at(x, format_.size, r.b, r.sequence.q_begin + r.first + begin, r.h);
      const RowsToPack<Target> rows =
          rows_to_pack(format_, x, source, left, min_of(width, left), width, features, direct.columns, true, s.staging);
      pack_transposed_panel<Target>(rows.data, rows.stride, transposed.depth / kStep, width, transposed.panel(panel),
                                    rows.ahead);
      pack_direct_rows<Target>(rows.data, rows.stride, begin, begin + width, direct);
    }
  }

  // What a row has beside dout: delta = rowsum(dout * out) - dlse, and the LSE in log2 units; +inf makes every
  // probability of an empty row 0.
  void load_statistics(const Rows& r, const QueryBlock& q) const {
    const index_t at = p_.lse_offset(r.b, r.h) + r.first, padded = round_up(r.count, kWidth);
    const Real* const lse = static_cast<const Real*>(f_.lse) + at;
    Real* const softmax_d = static_cast<Real*>(f_.softmax_d) + at;
    const index_t row = r.sequence.q_begin + r.first;
    const auto rows = [&](const Operand& x) { return row_at(x, format_.size, r.b, row, r.h); };
    format_.dot_rows(rows(f_.dout), f_.dout.row_stride * format_.size, rows(f_.out), f_.out.row_stride * format_.size,
                     r.count, p_.Dv, q.delta);
    const Real* const dlse = f_.dlse ? static_cast<const Real*>(f_.dlse) + at : nullptr;
    for (index_t i = 0; i < r.count; ++i) {
      if (dlse && std::isfinite(lse[i])) q.delta[i] -= dlse[i];
      softmax_d[i] = q.delta[i];
      q.lse_log2[i] = lse[i] == -kInfinity ? kInfinity : lse[i] * Real(kLog2e);
    }
    fill(q.lse_log2, r.count, padded, kInfinity);
    fill(q.delta, r.count, padded, Real(0));
  }

  void rows_without_keys(const Rows& r, const Worker& worker) const {
    const index_t slot = worker.slots.take(worker.index);
    const QueryBlock q = carve_block(worker.blocks + slot * block_bytes_);
    load_statistics(r, q);
    fill(q.dq, 0, r.count * stride_, Real(0));
    store_dq(r, q);
    worker.slots.give(slot, worker.index);
  }

  // States: those of the unit's query blocks.
  void key_block(index_t unit, index_t kb, State* states, const Worker& worker) const {
    const index_t b = units_.b(unit), hk = units_.hk(unit);
    const Sequence sequence = p_.sequence(b);
    const index_t first = kb * tiles_.keys;
    if (first >= sequence.k_len) return;
    [[maybe_unused]] const typename Target::Tiles::Session session;
    const Scratch& s = worker.scratch;
    const index_t keys = min_of(tiles_.keys, sequence.k_len - first), padded = round_up(keys, kRows);
    const index_t row = sequence.k_begin + first;
    load_rows(format_, row_at(p_.k, format_.size, b, row, hk), p_.k.row_stride * format_.size, keys, padded, p_.D,
              stride_, s.k);
    load_rows(format_, row_at(p_.v, format_.size, b, row, hk), p_.v.row_stride * format_.size, keys, padded, p_.Dv,
              v_stride_, s.v);
    pack_direct<Target>(s.k, stride_, {s.k_direct, padded, stride_});
    fill(s.dk, 0, padded * stride_, Real(0));
    fill(s.dv, 0, padded * v_stride_, Real(0));

    for (index_t g = 0; g < p_.group(); ++g)
      for (index_t qb = query_blocks_ - 1; qb >= 0; --qb) {
        Rows r{};
        if (!rows_of(unit, g, qb, r) || r.keys.begin >= first + keys || r.keys.end <= first) continue;
        State& state = states[g * query_blocks_ + qb];
        state.packed.begin([&] {
          state.slot = worker.slots.take(worker.index);
          state.turn.store(key_blocks_of(r).begin, std::memory_order_relaxed);
          pack(r, carve_block(worker.blocks + state.slot * block_bytes_), s);
        });
        state.packed.await();
        query_block(r, carve_block(worker.blocks + state.slot * block_bytes_), state, kb, {first, first + keys}, s);
        // Its turn was the last one: nobody else is at it any more.
        if (kb + 1 == key_blocks_of(r).end) worker.slots.give(state.slot, worker.index);
      }

    store_rows(s.dk, stride_, Real(p_.scale), f_.dk, p_.D, b, hk, row, keys);
    store_rows(s.dv, v_stride_, Real(p_.dropout.keep_scale), f_.dv, p_.Dv, b, hk, row, keys);
  }

  void query_block(const Rows& r, const QueryBlock& q, State& state, index_t kb, Range keys, const Scratch& s) const {
    if (p_.dropout.active)
      for (index_t j = keys.begin; j < keys.end; j += 64)
        dropout_columns<Simd, Target>(p_.dropout, r.b, r.h, r.first, r.count, j,
                                      s.dropout + (j - keys.begin) * tiles_.queries / 8, tiles_.queries / 8);
    if (addend_.columns_differ())
      addend_.columns(r.rule, r.b, r.h, {r.first, r.first + r.count}, keys, s.addend_rows, s.addend, tiles_.queries);
    else if (addend_.columns_given())
      addend_.row(r.rule, r.b, r.h, r.first, {}, keys, s.addend);
    for (index_t n = 0; n < keys.end - keys.begin; n += kRows) strip(r, q, keys, n, s);

    while (state.turn.load(std::memory_order_acquire) != kb) std::this_thread::yield();
    add_dq(r, q, keys, kb == key_blocks_of(r).begin, s);
    if (kb + 1 == key_blocks_of(r).end) store_dq(r, q);
    state.turn.store(kb + 1, std::memory_order_release);
  }

  ScoreGradients<Target> score_gradients(const Scratch& s) const { return {s.ds, tiles_.keys, tiles_.queries}; }

  // Keys n .. n + kRows - 1 of the block against the queries of the block.
  void strip(const Rows& r, const QueryBlock& q, Range keys, index_t n, const Scratch& s) const {
    const index_t padded = round_up(r.count, kWidth), j = keys.begin + n, ld = tiles_.queries;
    const index_t rows = min_of(kRows, keys.end - j);
    const Range seen = r.rule.visible_queries(Range{j, j + rows});
    const index_t begin = max_of<index_t>(seen.begin - r.first, 0), end = min_of(seen.end - r.first, r.count);
    const bool any = begin < end;
    const Range c{any ? begin / kWidth * kWidth : 0, any ? round_up(end, kWidth) : 0};
    if (!any) return;
    // A strip of dQ whose first row or last row sees these keys may have others in the next vector.
    score_gradients(s).clear(n, max_of<index_t>(c.begin - kWidth, 0), c.begin);
    score_gradients(s).clear(n, c.end, min_of(c.end + kWidth, padded));

    const Panels<Target> q_transposed{q.q_transposed, depth_, padded};
    const Panels<Target> dout_transposed{q.dout_transposed, v_depth_, padded};
    const auto strip = gradients_.strip(r.rule, {j, j + rows}, n, r.first, c, q.lse_log2, q.delta);
    for (index_t i = c.begin; i < c.end;) {
      const index_t origin = i / pitch_ * pitch_, next = min_of(origin + pitch_, c.end);
      multiply_strip<Target, false>({s.k + n * stride_, stride_, kStep}, q_transposed, 0, depth_, i, next,
                                    s.scores + (i - origin), pitch_);
      multiply_strip<Target, false>({s.v + n * v_stride_, v_stride_, kStep}, dout_transposed, 0, v_depth_, i, next,
                                    s.dp + (i - origin), pitch_);
      gradients_(strip, {i, next}, origin, s);
      i = next;
    }
    const Panels<Target> dout_direct{q.dout_direct, padded, v_stride_}, q_direct{q.q_direct, padded, stride_};
    const index_t from = begin / kCut * kCut, to = min_of(round_up(end, kCut), c.end);
    multiply_strip<Target, true, true>({s.p_rows + from, ld, kStep}, dout_direct, from, to, 0, v_stride_,
                                       s.dv + n * v_stride_, v_stride_);
    multiply_strip<Target, true, true>({s.ds_rows + from, ld, kStep}, q_direct, from, to, 0, stride_,
                                       s.dk + n * stride_, stride_);
  }

  // The first to add finds rows that nobody has cleared.
  void add_dq(const Rows& r, const QueryBlock& q, Range keys, bool first, const Scratch& s) const {
    const index_t padded = round_up(keys.end - keys.begin, kRows);
    const Panels<Target> k_direct{s.k_direct, padded, stride_};
    for (index_t i = 0; i < r.count; i += kRows) {
      Real* const dq = q.dq + i * stride_;
      const Range seen = r.rule.visible_keys(Range{r.first + i, r.first + min_of(i + kRows, r.count)});
      const index_t begin = max_of<index_t>(seen.begin - keys.begin, 0) / kDepth * kDepth;
      const index_t end = min_of(round_up(max_of<index_t>(seen.end - keys.begin, 0), kDepth), padded);
      if (first && (Target::kTiled || begin >= end)) fill(dq, 0, kRows * stride_, Real(0));
      if (begin >= end) continue;
      multiply_strip<Target, true, true>(score_gradients(s).rows(i, begin), k_direct, begin, end, 0, stride_, dq,
                                         stride_, first);
    }
  }

  void store_dq(const Rows& r, const QueryBlock& q) const {
    store_rows(q.dq, stride_, Real(p_.scale), f_.dq, p_.D, r.b, r.h, r.sequence.q_begin + r.first, r.count);
  }

  // rows * factor into rows first .. first + count - 1 of x.
  void store_rows(const Real* rows, index_t stride, Real factor, const Operand& x, index_t features, index_t b,
                  index_t h, index_t first, index_t count) const {
    constexpr index_t kMost = 64;
    Real factors[kMost];
    for (Real& of_row : factors) of_row = factor;
    for (index_t n = 0; n < count; n += kMost)
      format_.store_rows(rows + n * stride, stride, factors, min_of(kMost, count - n), features,
                         row_at(x, format_.size, b, first + n, h), x.row_stride * format_.size);
  }

  const BackwardProblem& f_;
  const Problem& p_;
  const Executor& executor_;
  const RowFormat<Target> format_;
  const Units units_;
  const Addend<Target> addend_;
  const Tiles tiles_;
  const BackwardGradients<Target> gradients_;
  const index_t pitch_;  // Of scores and dp.
  const index_t depth_, v_depth_, stride_, v_stride_;
  const index_t query_blocks_, key_blocks_, block_bytes_;
};

}  // namespace flash_attn::cpu
