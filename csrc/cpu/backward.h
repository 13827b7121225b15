// Backward pass on the CPU: FlashAttention-2, Algorithm 2, stationary in dK and dV.
//
// A wave of (b, hk) units runs tasks of (unit, key block). A task walks the query blocks, last to first, of all query
// heads of the group, packing Q and dO of those that no task has met before, and strip by strip of kRows keys: S^T =
// K Q^T and dP^T = V dO^T with queries in the lanes, element-wise P^T and dS^T, dV += P^T dO, dK += dS^T Q; then dQ +=
// dS K for the whole query block. Where threads share units, a task may be a chunk of query blocks (backward_plan.h).
//
// dQ rows are shared by key blocks, and dK and dV by chunks. They are added in the order of the key blocks and of the
// chunks, by turns, so no sum ever depends on threads; tasks are handed out in that order, so whoever is waited for is
// running. No gradient uses atomics.
#pragma once

#include <new>

#include "core/thread_pool.h"
#include "cpu/backward_ahead.h"
#include "cpu/backward_gradients.h"
#include "cpu/backward_statistics.h"
#include "cpu/dropout_bits.h"
#include "cpu/pack.h"
#include "cpu/results.h"
#include "cpu/rows_ahead.h"
#include "cpu/slots.h"
#include "cpu/target.h"

namespace flash_attn::cpu {

template <class Target>
class Backward {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  static constexpr index_t W = Simd::W, kStep = Target::Format::kStep, kRows = Target::kRows;
  static constexpr index_t kDepth = Target::kDepth, kWidth = Target::kWidth, kCut = kDepthCut<Target>;
  static constexpr index_t kParts = Target::kParts;
  using QueryBlock = BackwardBlock<Target>;
  using Scratch = BackwardScratch<Target>;
  using State = BackwardBlockState<Target>;
  using Worker = BackwardWorker<Target>;
  using Sums = KeySums<Target>;
  using Wave = typename BackwardPlan<Target>::Wave;
  using Memory = typename BackwardPlan<Target>::Memory;
  using Rows = typename BackwardWalk<Target>::Rows;
  using Keys = typename BackwardWalk<Target>::Keys;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  Backward(const BackwardProblem& backward, const Sequences& sequences, const Executor& executor)
      : f_(backward),
        p_(backward.problem),
        executor_(executor),
        format_(row_format<Target>(p_.dtype)),
        plan_(p_, sequences, executor),
        walk_(plan_),
        gradients_(p_, plan_.addend, plan_.tiles) {}

  void run() {
    if (plan_.units.count() == 0) return;
    const Wave wave = plan_.plan_wave();
    const Workspace workspace(plan_.carve(wave, nullptr).bytes);
    const Memory memory = plan_.carve(wave, workspace.data());
    for (int i = 0; i < wave.workers; ++i) {
      const Scratch s = plan_.carve_scratch(memory.scratch + i * memory.scratch_bytes);
      *s.loaded = -1;
      new (s.asks) RowsInTurn;
    }
    Slots slots(wave.blocks, wave.workers);
    for (index_t first = 0; first < plan_.units.count(); first += wave.units)
      run_wave(wave, memory, slots, first, min_of(wave.units, plan_.units.count() - first));
  }

 private:
  void run_wave(const Wave& wave, const Memory& memory, Slots& slots, index_t first, index_t n) const {
    const index_t per_unit = plan_.unit_blocks(), blocks = plan_.key_blocks;
    for (index_t i = 0; i < n * per_unit; ++i) new (memory.states + i) State;
    // Each worker on units of its own: neighbours in time then do not wait for each other's dQ, and what is in work
    // at a time stays in the cache. Those that are shared side by side.
    const index_t shared = plan_.shared({first, first + n}, wave.workers), own = n - shared;
    const auto sums_of = [&](index_t unit, index_t kb) {
      return plan_.carve_sums(memory.sums + ((unit - own) * blocks + kb) * memory.sums_bytes);
    };
    for (index_t i = 0; plan_.split && i < shared * blocks; ++i) new (sums_of(own, i).turn) std::atomic<index_t>(0);
    const auto worker_of = [&](int i) {
      return Worker{i, slots, memory.blocks, plan_.carve_scratch(memory.scratch + i * memory.scratch_bytes)};
    };
    parallel_for_groups(executor_, own, blocks, shared * plan_.unit_tasks(), [&](index_t task, int i) {
      const Worker worker = worker_of(i);
      const auto states_of = [&](index_t unit) { return memory.states + unit * per_unit; };
      const index_t nth = task - own * blocks;  // Of the shared units' tasks.
      if (nth < 0) return key_block(first + task / blocks, task % blocks, states_of(task / blocks), worker);
      const index_t unit = own + nth % shared, in_unit = nth / shared;
      if (!plan_.split) return key_block(first + unit, in_unit, states_of(unit), worker);
      const index_t kb = in_unit / plan_.most_chunks, chunk = in_unit % plan_.most_chunks;
      chunk_of_key_block(first + unit, kb, chunk, states_of(unit), sums_of(unit, kb), worker);
    });
    parallel_for(executor_, n * per_unit, [&](index_t task, int i) {
      const index_t in_unit = task % per_unit;
      Rows r{};
      if (walk_.rows_of(first + task / per_unit, in_unit / plan_.query_blocks, in_unit % plan_.query_blocks, r) &&
          r.keys.empty())
        rows_without_keys(r, worker_of(i));
    });
  }

  void pack(const Rows& r, const QueryBlock& q, const Scratch& s) const {
    const index_t padded = round_up(r.count, kWidth);
    pack_both_ways(r, f_.dout, p_.Dv, {q.dout_transposed, kParts * plan_.v_depth, padded},
                   {q.dout_direct, kParts * padded, plan_.v_stride}, s);
    load_statistics(r, q);
    pack_both_ways(r, p_.q, p_.D, {q.q_transposed, kParts * plan_.depth, padded},
                   {q.q_direct, kParts * padded, plan_.stride}, s);
  }

  // Rows of q or dout with queries in the lanes and with features in the lanes, panel by panel of the former, so that
  // they come from L1 the second time.
  void pack_both_ways(const Rows& r, const Operand& x, index_t features, const Panels<Target>& transposed,
                      const Panels<Target>& direct, const Scratch& s) const {
    for (index_t panel = 0; panel < transposed.count(); ++panel) {
      const index_t begin = transposed.begin(panel), width = transposed.width(panel), left = r.count - begin;
      const char* const source = row_at(x, format_.size, r.b, r.sequence.q_begin + r.first + begin, r.h);
      const RowsToPack<Target> rows = rows_to_pack(format_, x, source, left, min_of(width, left), width, features,
                                                   kParts * direct.columns, true, s.staging);
      pack_transposed_panel(rows, transposed.depth / kStep, width, transposed.panel(panel));
      pack_direct_rows<Target>({rows.data, rows.stride}, begin, begin + width, direct);
    }
  }

  void load_statistics(const Rows& r, const QueryBlock& q) const {
    const index_t padded = round_up(r.count, kWidth);
    cpu::load_statistics(f_, format_, r.b, r.h, {r.first, r.first + r.count}, q.lse_log2, q.delta, true);
    fill(q.lse_log2, r.count, padded, kInfinity);
    fill(q.delta, r.count, padded, Real(0));
  }

  void rows_without_keys(const Rows& r, const Worker& worker) const {
    const index_t slot = worker.slots.take(worker.index);
    const QueryBlock q = plan_.carve_block(worker.blocks + slot * plan_.block_bytes);
    load_statistics(r, q);
    fill(q.dq, 0, r.count * plan_.stride, Real(0));
    store_dq(r, q);
    worker.slots.give(slot, worker.index);
  }

  // A task for a whole key block. States: those of the unit's query blocks.
  void key_block(index_t unit, index_t kb, State* states, const Worker& worker) const {
    const Keys k = walk_.keys_of(unit, kb);
    if (k.keys.empty()) return;
    const Scratch& s = worker.scratch;
    [[maybe_unused]] const typename Target::Tiles::Session session;
    load_keys(k, s);
    const Sums sums = s.sums.of(k.padded);
    sums.clear();
    BackwardAhead<Target> ahead(plan_, walk_, f_, k, *s.asks);
    for (index_t c = 0; c < k.chunks; ++c) {
      if constexpr (Target::kTall) ahead.before_chunk(c);
      const bool apart = Target::kTiled && c > 0;  // Other products make sums of their own (chunks_of_blocks).
      const Sums own = apart ? s.chunk.of(k.padded) : sums;
      if (apart) own.clear();
      if (meet_chunk(k, c, states, own, worker) && apart) sums.add(own);
    }
    store_gradients(k, sums);
  }

  // A task for a chunk of a key block, whose sums join those of the chunks before.
  void chunk_of_key_block(index_t unit, index_t kb, index_t c, State* states, Sums sums, const Worker& worker) const {
    const Keys k = walk_.keys_of(unit, kb);
    if (k.keys.empty() || c >= k.chunks) return;
    const bool any = walk_.chunk_sees(k, c);
    if (!any && c > 0) return;
    index_t before = c - 1, after = c + 1;
    while (before >= 0 && !walk_.chunk_sees(k, before)) --before;
    while (after < k.chunks && !walk_.chunk_sees(k, after)) ++after;
    if (!any && after < k.chunks) return;  // Of what no chunk sees the first one stores zeros.
    const Scratch& s = worker.scratch;
    [[maybe_unused]] const typename Target::Tiles::Session session;
    sums = sums.of(k.padded);
    const Sums own = before < 0 ? sums : s.chunk.of(k.padded);
    s.asks->clear();
    load_keys(k, s);
    own.clear();
    meet_chunk(k, c, states, own, worker);
    if (before >= 0) {
      sums.await(before);
      sums.add(own);
    }
    if (after < k.chunks)
      sums.pass_on(c);
    else
      store_gradients(k, sums);
  }

  void load_keys(const Keys& k, const Scratch& s) const {
    const index_t which = k.unit * plan_.key_blocks + k.index;
    if (*s.loaded == which) return;
    *s.loaded = which;
    const index_t row = k.sequence.k_begin + k.keys.begin, left = k.sequence.k_len - k.keys.begin;
    const auto load = [&](const Operand& x, index_t features, index_t stride, Elem* to) {
      load_rows_of_run(format_, row_at(x, format_.size, plan_.units.b(k.unit), row, k.hk), x.row_stride * format_.size,
                       left, k.keys.end - k.keys.begin, k.padded, features, stride, to);
    };
    load(p_.k, p_.D, kParts * plan_.stride, s.k);
    load(p_.v, p_.Dv, kParts * plan_.v_stride, s.v);
    pack_direct<Target>(s.k, kParts * plan_.stride, {s.k_direct, kParts * k.padded, plan_.stride});
  }
  void store_gradients(const Keys& k, const Sums& sums) const {
    const index_t b = plan_.units.b(k.unit), n = k.keys.end - k.keys.begin, row = k.sequence.k_begin + k.keys.begin;
    store_rows(sums.dk, plan_.stride, Real(p_.scale), f_.dk, p_.D, b, k.hk, row, n);
    store_rows(sums.dv, plan_.v_stride, Real(p_.dropout.keep_scale), f_.dv, p_.Dv, b, k.hk, row, n);
  }

  // False if none of them sees any of the keys.
  bool meet_chunk(const Keys& k, index_t c, State* states, const Sums& sums, const Worker& worker) const {
    bool any = false;
    walk_.any_of_chunk(k, c, [&](index_t head, index_t block) {
      any = meet(k, head, block, states, sums, worker) || any;
      return false;
    });
    return any;
  }

  bool meet(const Keys& k, index_t head, index_t block, State* states, const Sums& sums, const Worker& worker) const {
    const Scratch& s = worker.scratch;
    Rows r{};
    if (!walk_.sees(k, head, block, r)) return false;
    State& state = states[r.h % p_.group() * plan_.query_blocks + r.first / plan_.tiles.queries];
    state.packed.begin([&] {
      state.slot = worker.slots.take(worker.index);
      state.turn.store(walk_.key_blocks_of(r).begin, std::memory_order_relaxed);
      pack(r, plan_.carve_block(worker.blocks + state.slot * plan_.block_bytes), s);
    });
    state.packed.await();
    query_block(r, plan_.carve_block(worker.blocks + state.slot * plan_.block_bytes), state, k.index, k.keys, sums, s);
    // Its turn was the last one: nobody else is at it any more.
    if (k.index + 1 == walk_.key_blocks_of(r).end) worker.slots.give(state.slot, worker.index);
    return true;
  }

  void query_block(const Rows& r, const QueryBlock& q, State& state, index_t kb, Range keys, const Sums& sums,
                   const Scratch& s) const {
    if (p_.dropout.active)
      for (index_t j = keys.begin; j < keys.end; j += 64)
        dropout_columns<Simd, Target>(p_.dropout, r.b, r.h, r.first, r.count, j,
                                      s.dropout + (j - keys.begin) * plan_.tiles.queries / 8, plan_.tiles.queries / 8);
    if (plan_.addend.columns_differ())
      plan_.addend.columns(r.rule, r.b, r.h, {r.first, r.first + r.count}, keys, s.addend_rows, s.addend,
                           plan_.tiles.queries);
    else if (plan_.addend.columns_given())
      plan_.addend.row(r.rule, r.b, r.h, r.first, {}, keys, s.addend);
    for (index_t n = 0; n < keys.end - keys.begin; n += kRows) strip(r, q, keys, n, sums, s);

    while (state.turn.load(std::memory_order_acquire) != kb) std::this_thread::yield();
    add_dq(r, q, keys, kb == walk_.key_blocks_of(r).begin, s);
    if (kb + 1 == walk_.key_blocks_of(r).end) store_dq(r, q);
    state.turn.store(kb + 1, std::memory_order_release);
  }

  ScoreGradients<Target> score_gradients(const Scratch& s) const {
    return {s.ds, plan_.tiles.keys, plan_.tiles.queries};
  }

  // Keys n .. n + kRows - 1 of the block against the queries of the block.
  void strip(const Rows& r, const QueryBlock& q, Range keys, index_t n, const Sums& sums, const Scratch& s) const {
    const index_t padded = round_up(r.count, kWidth), j = keys.begin + n, ld = plan_.tiles.queries;
    const index_t rows = min_of(kRows, keys.end - j);
    const Range seen = r.rule.visible_queries(Range{j, j + rows});
    const index_t begin = max_of<index_t>(seen.begin - r.first, 0), end = min_of(seen.end - r.first, r.count);
    const bool any = begin < end;
    const Range c{any ? begin / kWidth * kWidth : 0, any ? round_up(end, kWidth) : 0};
    if (!any) return;
    // A strip of dQ whose first row or last row sees these keys may have others in the next vector.
    score_gradients(s).clear(n, max_of<index_t>(c.begin - kWidth, 0), c.begin);
    score_gradients(s).clear(n, c.end, min_of(c.end + kWidth, padded));

    const Panels<Target> q_transposed{q.q_transposed, kParts * plan_.depth, padded};
    const Panels<Target> dout_transposed{q.dout_transposed, kParts * plan_.v_depth, padded};
    const auto rows_of = [&](const Elem* x, index_t stride) {
      return StripA<Elem>{x + n * kParts * stride, kParts * stride, kStep};
    };
    const auto strip = gradients_.strip(r.rule, {j, j + rows}, n, r.first, c, q.lse_log2, q.delta);
    for (index_t i = c.begin; i < c.end;) {
      const index_t origin = i / plan_.pitch * plan_.pitch, next = min_of(origin + plan_.pitch, c.end);
      multiply_queries(rows_of(s.k, plan_.stride), q_transposed, {i, next}, s.scores + (i - origin), s);
      multiply_queries(rows_of(s.v, plan_.v_stride), dout_transposed, {i, next}, s.dp + (i - origin), s);
      gradients_(strip, {i, next}, origin, s);
      i = next;
    }
    const Panels<Target> dout_direct{q.dout_direct, kParts * padded, plan_.v_stride};
    const Panels<Target> q_direct{q.q_direct, kParts * padded, plan_.stride};
    const index_t from = begin / kCut * kCut, to = min_of(round_up(end, kCut), c.end);
    multiply_strip<Target, true, true>({s.p_rows + from, kParts * ld, kStep}, dout_direct, from, to, 0, plan_.v_stride,
                                       sums.dv + n * plan_.v_stride, plan_.v_stride);
    multiply_strip<Target, true, true>({s.ds_rows + from, kParts * ld, kStep}, q_direct, from, to, 0, plan_.stride,
                                       sums.dk + n * plan_.stride, plan_.stride);
  }

  // S^T or dP^T of some columns, in rows of plan_.pitch.
  FA_INLINE void multiply_queries(const StripA<Elem>& a, const Panels<Target>& b, Range columns, Real* c,
                                  const Scratch& s) const {
    if constexpr (Target::kTall) {
      PanelAsks asks(*s.asks);
      Range watched = columns;
      multiply_watched<Target, false>(a, b, 0, b.depth, columns.begin, columns.end, c, plan_.pitch, watched, asks,
                                      false);
    } else {
      multiply_strip<Target, false>(a, b, 0, b.depth / kParts, columns.begin, columns.end, c, plan_.pitch);
    }
  }

  // The first to add finds rows that nobody has cleared. Others find rows that left L2 where queries are many: they are
  // asked for two strips ahead, which a Zen 5 by itself does too late.
  void add_dq(const Rows& r, const QueryBlock& q, Range keys, bool first, const Scratch& s) const {
    const index_t padded = round_up(keys.end - keys.begin, kRows), of_strip = kRows * plan_.stride;
    const Panels<Target> k_direct{s.k_direct, kParts * padded, plan_.stride};
    for (index_t i = 0; i < r.count; i += kRows) {
      Real* const dq = q.dq + i * plan_.stride;
      if (!Target::kTiled && !first && i + 2 * kRows < r.count)
        prefetch_row(dq + 2 * of_strip, of_strip * index_t(sizeof(Real)));
      const Range seen = r.rule.visible_keys(Range{r.first + i, r.first + min_of(i + kRows, r.count)});
      const index_t begin = max_of<index_t>(seen.begin - keys.begin, 0) / kDepth * kDepth;
      const index_t end = min_of(round_up(max_of<index_t>(seen.end - keys.begin, 0), kDepth), padded);
      if (first && (Target::kTiled || begin >= end)) fill(dq, 0, of_strip, Real(0));
      if (begin >= end) continue;
      multiply_strip<Target, true, true>(score_gradients(s).rows(i, begin), k_direct, begin, end, 0, plan_.stride, dq,
                                         plan_.stride, first);
    }
  }

  void store_dq(const Rows& r, const QueryBlock& q) const {
    store_rows(q.dq, plan_.stride, Real(p_.scale), f_.dq, p_.D, r.b, r.h, r.sequence.q_begin + r.first, r.count);
  }

  // rows * factor into rows first .. first + count - 1 of x.
  void store_rows(const Real* rows, index_t stride, Real factor, const Operand& x, index_t features, index_t b,
                  index_t h, index_t first, index_t count) const {
    constexpr index_t kMost = 64;
    const index_t elements = p_.Tq * p_.H * p_.D + p_.Tk * p_.Hk * (p_.D + p_.Dv);
    const auto store = result_rows(format_, x, features, elements * format_.size, executor_);
    Real factors[kMost];
    for (Real& of_row : factors) of_row = factor;
    for (index_t n = 0; n < count; n += kMost)
      store(rows + n * stride, stride, factors, min_of(kMost, count - n), features,
            row_at(x, format_.size, b, first + n, h), x.row_stride * format_.size);
  }

  const BackwardProblem& f_;
  const Problem& p_;
  const Executor& executor_;
  const RowFormat<Target> format_;
  const BackwardPlan<Target> plan_;
  const BackwardWalk<Target> walk_;
  const BackwardGradients<Target> gradients_;
};

}  // namespace flash_attn::cpu
