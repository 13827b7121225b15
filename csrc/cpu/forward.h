// Forward pass on the CPU: FlashAttention-2, Algorithm 1.
//
// Work is cut into waves of (b, hk) units, which reach K and V by one of three approaches (forward_block.h). Packed: a
// wave runs tasks of (unit, block of queries, query head of the group), each of which packs what it sees of K and V, as
// far as it is not there yet. In place and direct: tasks are (unit, range of keys), in which all query heads of the
// group meet each key block; then the ranges of a unit are merged (https://pytorch.org/blog/flash-decoding). Packed or
// in place, strips of rows meet whole key blocks (forward_strips.h), or, where keys are few, groups of queries in the
// lanes parts of them (forward_lanes.h); direct, all key heads of a task meet a few keys at a time (forward_direct.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <new>

#include "cpu/forward_ahead.h"
#include "cpu/forward_direct.h"
#include "cpu/forward_lanes.h"
#include "cpu/on_demand.h"
#include "cpu/row_ends.h"
#include "cpu/slots.h"

namespace flash_attn::cpu {

template <class Target>
class Forward {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using Simd = typename Target::Simd;
  using V = typename Simd::V;
  using Block = ForwardBlock<Target>;
  using Scratch = ForwardScratch<Target>;
  using Partial = ForwardPartial<Target>;
  static constexpr index_t W = Simd::W, kRows = Target::kRows;

 public:
  Forward(const ForwardProblem& forward, const Executor& executor, Approach approach, const Units& units)
      : f_(forward),
        p_(f_.problem),
        executor_(executor),
        units_(units),
        plan_(f_, executor, approach, units),
        ahead_(plan_),
        strips_(plan_),
        lanes_(plan_),
        direct_(plan_, strips_) {}

  void run() {
    if (plan_.approach != Approach::packed) return run_ranges();
    if constexpr (!Target::kDirectTiles) plan_.alone ? run_alone() : run_shared();
  }

 private:
  // K and V of a unit while some of its tasks are left: parts of packed keys in a slot of memory.
  struct PackedUnit {
    OnDemand memory;
    index_t slot;
    std::atomic<index_t> tasks_left;
  };
  // What the tasks of a wave share.
  struct PackedMemory {
    Elem* keys;         // slots x unit_elems
    OnDemand* parts;    // slots x unit_parts
    PackedUnit* units;  // units of a wave
    index_t unit_elems, unit_parts, bytes;
  };
  PackedMemory carve_packed(char* base, index_t slots, index_t wave) const {
    Carver c(base);
    PackedMemory m{};
    m.unit_elems = plan_.packed.block_elems(), m.unit_parts = plan_.packed.parts();
    m.keys = c.take<Elem>(slots * m.unit_elems);
    m.parts = c.take<OnDemand>(slots * m.unit_parts);
    m.units = c.take<PackedUnit>(wave);
    m.bytes = c.used();
    return m;
  }

  void run_shared() {
    const index_t unit_bytes = plan_.packed.block_elems() * index_t(sizeof(Elem));
    const index_t per_unit = unit_tasks(), threads = executor_.num_threads;
    // Workers on units of their own hold that one each and another that they help with, whatever the number of units.
    const bool own = units_.count() >= threads && Units::quick_to_allocate(2 * threads * unit_bytes);
    const index_t wave = own ? units_.count() : units_.wave(unit_bytes, per_unit, threads);
    const index_t held = own ? min_of(wave, 2 * threads) : wave;
    const int workers = worker_count(executor_, wave * per_unit);
    const index_t shared_bytes = carve_packed(nullptr, held, wave).bytes, scratch_bytes = plan_.carve(nullptr, 1).bytes;
    const Workspace memory(shared_bytes + workers * scratch_bytes);
    const PackedMemory packed = carve_packed(memory.data(), held, wave);
    Slots slots(held, workers);

    for (index_t first = 0; first < units_.count(); first += wave) {
      const index_t n = min_of(wave, units_.count() - first);
      for (index_t i = 0; i < n; ++i) (new (packed.units + i) PackedUnit)->tasks_left.store(per_unit);
      parallel_for_groups(executor_, own ? n : n * per_unit, own ? per_unit : 1, 0, [&](index_t task, int worker) {
        const Scratch s = plan_.carve(memory.data() + shared_bytes + worker * scratch_bytes, 1);
        PackedUnit& unit = packed.units[task / per_unit];
        unit.memory.begin([&] {
          unit.slot = slots.take(worker);
          OnDemand* const parts = packed.parts + unit.slot * packed.unit_parts;
          for (index_t part = 0; part < packed.unit_parts; ++part) new (parts + part) OnDemand;
        });
        unit.memory.await();
        run_task(first + task / per_unit, task % per_unit, s, [&](Block& block) {
          block.packed = packed.keys + unit.slot * packed.unit_elems;
          pack_shared(block, packed.parts + unit.slot * packed.unit_parts, s);
        });
        if (unit.tasks_left.fetch_sub(1) == 1) slots.give(unit.slot, worker);
      });
    }
  }

  // Each worker packs for itself.
  void run_alone() {
    const index_t per_unit = unit_tasks(), scratch_bytes = plan_.carve(nullptr, 1).bytes;
    const int workers = worker_count(executor_, units_.count() * per_unit);
    const Workspace memory(workers * scratch_bytes);
    const auto scratch = [&](int worker) { return plan_.carve(memory.data() + worker * scratch_bytes, 1); };
    for (int worker = 0; worker < workers; ++worker)
      std::fill_n(scratch(worker).parts, plan_.packed.parts(), index_t(-1));
    parallel_for_groups(executor_, units_.count(), per_unit, 0, [&](index_t task, int worker) {
      const index_t unit = task / per_unit;
      const Scratch s = scratch(worker);
      run_task(unit, task % per_unit, s, [&](Block& block) { pack_alone(block, unit, s); });
    });
  }

  index_t unit_tasks() const { return p_.group() * plan_.query_blocks; }

  // One block of queries of one head. The heads of a group meet the same keys one after another.
  template <class Pack>
  void run_task(index_t unit, index_t task, const Scratch& s, const Pack& pack) const {
    [[maybe_unused]] const typename Target::Tiles::Session session;
    const index_t g = task % p_.group(), nth = task / p_.group();
    const Sequence sequence = p_.sequence(units_.b(unit));
    if (nth >= plan_.blocks_of(sequence)) return;
    Block& block = begin(unit, g, plan_.block_in_turn(sequence, units_.hk(unit), nth), s);
    block.nth = nth;
    if (asks_ahead<Target>()) block.next = ahead_.of(block, unit);
    pack(block);
    attend(block, {plan_.first_key(block), block.keys.end}, s);
    finish(block, s);
    if (f_.s_dmask) strips_.write_dmask(block, s);
  }

  // All rows of a block against `keys`: all that they see, where queries are in the lanes.
  void attend(const Block& block, Range keys, const Scratch& s) const {
    if (!keys.empty() && plan_.in_lanes(block.sequence)) {
      if (plan_.approach == Approach::in_place) strips_.pack_seen(block, 0, s);
      if constexpr (Lanes<Target>::kThere) lanes_.attend(block, s);
    } else {
      strips_.attend(block, keys, s);
    }
    strips_.clear_unseen(block, s);
  }

  // What the tasks of a wave share: what each range gave a block of rows, and how many of its ranges are left.
  struct RangeMemory {
    char* partials;  // blocks x splits
    std::atomic<index_t>* left;
    index_t partial_bytes, splits, bytes;
  };
  RangeMemory carve_ranges(char* base, index_t blocks, index_t splits) const {
    Carver c(base);
    RangeMemory m{};
    m.partial_bytes = plan_.carve_partial(nullptr).bytes, m.splits = splits;
    m.partials = c.take<char>(splits > 1 ? blocks * splits * m.partial_bytes : 0);
    m.left = c.take<std::atomic<index_t>>(splits > 1 ? blocks : 0);
    m.bytes = c.used();
    return m;
  }
  Partial partial(const RangeMemory& m, index_t nth, index_t split) const {
    return plan_.carve_partial(m.partials + (nth * m.splits + split) * m.partial_bytes);
  }

  // Tasks are ranges of keys of a block of rows. The ranges of a sequence depend on its own length, the
  // number of key heads and num_splits alone, so results do not depend on threads or on other sequences.
  void run_ranges() {
    const index_t splits = splits_of(units_.longest_k()), blocks = blocks_of_unit();
    const index_t of_unit = carve_ranges(nullptr, blocks, splits).bytes;
    const index_t fit = units_.wave(of_unit, blocks * splits, executor_.num_threads);
    const index_t slots = slots_of(fit, splits), wave = fit / slots * slots * blocks;
    const index_t scratch_bytes = plan_.carve(nullptr, slots).bytes;
    const int workers = worker_count(executor_, wave / slots * splits);
    const Workspace memory(workers * scratch_bytes + carve_ranges(nullptr, wave, splits).bytes);
    const RangeMemory ranges = carve_ranges(memory.data() + workers * scratch_bytes, wave, splits);

    for (index_t first = 0; first < units_.count() * blocks; first += wave) {
      const index_t n = min_of(wave, units_.count() * blocks - first);
      for (index_t i = 0; i < n && splits > 1; ++i) new (ranges.left + i) std::atomic<index_t>(splits);
      // Memory is read in its order, or by the thread that has read it in the last call and finds it in its cache.
      const index_t tasks = n / slots * splits, own = plan_.approach == Approach::direct ? 0 : tasks;
      parallel_for_groups(executor_, own, 1, tasks - own, [&](index_t task, int worker) {
        const index_t nth = task / splits * slots, split = task % splits;
        const Scratch s = plan_.carve(memory.data() + worker * scratch_bytes, slots);
        attend_range(first + nth, slots, split, s);
        for (index_t i = 0; i < slots; ++i)
          if (splits == 1)
            finish(s.block[i], plan_.slot(s, i));
          else
            keep(s.block[i], plan_.slot(s, i), partial(ranges, nth + i, split));
        for (index_t i = 0; i < slots && splits > 1; ++i)
          if (ranges.left[nth + i].fetch_sub(1, std::memory_order_acq_rel) == 1)
            merge_ranges(first, nth + i, ranges, s);
      });
    }
  }

  // By whoever has finished the last range of a block of rows, in the order of the ranges.
  void merge_ranges(index_t first, index_t nth, const RangeMemory& ranges, const Scratch& s) const {
    const Block& block = begin_block(first + nth, s);
    clear(block, s);
    for (index_t split = 0; split < ranges.splits; ++split) merge(block, partial(ranges, nth, split), s);
    finish(block, s);
  }

  // Blocks of a unit's rows: of as many heads as meet keys together, or of some queries of a head.
  index_t blocks_of_unit() const { return ceil_div(p_.group(), plan_.heads) * plan_.query_blocks; }
  Block& begin_block(index_t nth, const Scratch& s) const {
    const index_t blocks = blocks_of_unit(), in_unit = nth % blocks;
    return begin(nth / blocks, in_unit / plan_.query_blocks * plan_.heads, in_unit % plan_.query_blocks, s);
  }

  // Key heads that a task works on, `most` at most.
  index_t slots_of(index_t most, index_t splits) const {
    if (plan_.approach != Approach::direct) return 1;
    return heads_side_by_side(p_.Hk, most, units_.count() * splits, executor_);
  }

  // Ranges of a sequence of so many keys.
  index_t splits_of(index_t keys) const {
    const index_t blocks = ceil_div(keys, plan_.tiles.keys);
    const index_t by_default = ceil_div(blocks * plan_.tiles.keys, plan_.range_keys(keys));
    return max_of<index_t>(1, min_of<index_t>(p_.num_splits > 0 ? p_.num_splits : by_default, blocks));
  }

  // Key blocks of range `split`, which may have none, for `count` blocks of one sequence, from the nth on.
  void attend_range(index_t nth, index_t count, index_t split, const Scratch& s) const {
    const index_t keys = plan_.tiles.keys, k_len = p_.sequence(units_.b(nth / blocks_of_unit())).k_len;
    const index_t blocks = ceil_div(k_len, keys), splits = splits_of(k_len);
    const auto begin_of = [&](index_t n) { return min_of(n, splits) * blocks / splits * keys; };
    const Range range{begin_of(split), begin_of(split + 1)};
    for (index_t i = 0; i < count; ++i) begin_block(nth + i, plan_.slot(s, i));
    if constexpr (most_rows<Target>(Approach::direct) > 0)
      if (plan_.approach == Approach::direct) return direct_.attend(count, range, s);
    [[maybe_unused]] const typename Target::Tiles::Session session;
    if constexpr (most_rows<Target>(Approach::in_place) > 0) attend(*s.block, range, s);
  }

  // Packs what the rows of a block see of its unit, unless it is there. Parts that others are packing come last.
  void pack_shared(const Block& block, OnDemand* parts, const Scratch& s) const {
    if (block.keys.empty()) return;
    const Range seen = plan_.packed.parts_of(block.keys, block.sequence.k_len);
    for (index_t n = seen.begin; n < seen.end; ++n) parts[n].begin([&] { pack_part(block, n, s); });
    for (index_t n = seen.begin; n < seen.end; ++n) parts[n].await();
  }
  void pack_alone(const Block& block, index_t unit, const Scratch& s) const {
    if (block.keys.empty()) return;
    const Range seen = plan_.packed.parts_of(block.keys, block.sequence.k_len);
    const index_t parts_of_unit = ceil_div(units_.longest_k(), kPackedKeys);
    for (index_t n = seen.begin; n < seen.end; ++n) {
      index_t& there = s.parts[plan_.packed.place(n)];
      if (there == unit * parts_of_unit + n) continue;
      pack_part(block, n, s);
      there = unit * parts_of_unit + n;
    }
  }
  void pack_part(const Block& block, index_t part, const Scratch& s) const {
    plan_.packed.pack_part(block.b, block.h / p_.group(), part, block.sequence.k_len, block.packed, s.staging);
  }

  // Sets up a block, which may have no rows, and an empty state of its rows.
  Block& begin(index_t unit, index_t g, index_t query_block, const Scratch& s) const {
    Block& block = *s.block;
    block = {};
    block.b = units_.b(unit);
    block.heads = min_of(plan_.heads, p_.group() - g);
    block.h = units_.hk(unit) * p_.group() + g;
    block.first = query_block * plan_.tiles.queries;
    block.packed = s.packed;
    block.sequence = p_.sequence(block.b);
    block.rows = max_of<index_t>(0, min_of(plan_.tiles.queries, (block.sequence.q_len - block.first) * block.heads));
    if (block.rows == 0) return block;
    for (index_t n = 0; n < block.heads; ++n) s.rules[n] = p_.template score_rule<Real>(block.b, block.h + n);
    block.rules = s.rules;
    block.keys = block.seen({0, block.rows});
    block.front = plan_.packed.front(block.keys, block.sequence.k_len);
    load_queries(block, s);
    for (index_t r = 0; r < round_up(block.rows, plan_.row_multiple()); ++r) s.state[r] = {};
    if (plan_.approach == Approach::direct) clear(block, s);
    return block;
  }

  // Calls each(first, count) for rows of a block that are neighbours in memory: queries of a head, or heads of a query.
  template <class Each>
  FA_INLINE void each_run(const Block& block, const Each& each) const {
    const index_t run = block.heads == 1 ? block.rows : block.heads;
    for (index_t r = 0; r < block.rows; r += run) each(r, run);
  }
  FA_INLINE index_t row_step(const Block& block, const Operand& x) const {  // bytes
    return (block.heads == 1 ? x.row_stride : x.head_stride) * plan_.format.size;
  }
  FA_INLINE char* row_of(const Block& block, const Operand& x, index_t r) const {
    return row_at(x, plan_.format.size, block.b, block.sequence.q_begin + block.query(r), block.head(r));
  }

  void clear(const Block& block, const Scratch& s) const {
    fill(s.o, 0, round_up(block.rows, plan_.row_multiple()) * plan_.o_stride, Real(0));
  }

  // Where they are, if products can take them there: whole strips of vectors, which wait for no copy. Tiles read rows
  // that lie one after another, and S_dmask reads them again when the output, which may be in their place, is written.
  void load_queries(Block& block, const Scratch& s) const {
    block.q = s.rows, block.q_stride = plan_.q_stride;
    if (plan_.approach == Approach::packed && !Target::kTiled && !f_.s_dmask &&
        block.rows % plan_.row_multiple() == 0 && is_as_packed(plan_.format, p_.q, p_.D, plan_.q_stride)) {
      block.q = reinterpret_cast<const Elem*>(row_of(block, p_.q, 0)), block.q_stride = p_.q.row_stride;
      return;
    }
    Elem* const rows = Target::kDirectTiles ? s.staging : s.rows;
    each_run(block, [&](index_t r, index_t count) {
      const index_t padded = r + count == block.rows ? round_up(block.rows, plan_.row_multiple()) - r : count;
      load_rows(plan_.format, row_of(block, p_.q, r), row_step(block, p_.q), count, padded, p_.D, plan_.q_stride,
                rows + r * plan_.q_stride);
    });
    if constexpr (Target::kDirectTiles) DirectTiles<Target>::load_queries(rows, plan_.q_stride, block.rows, s.rows);
    plan_.sum_pairs(block.rows, s);
  }

  void keep(const Block& block, const Scratch& s, const Partial& part) const {
    std::memcpy(part.o, s.o, static_cast<std::size_t>(block.rows * plan_.o_stride) * sizeof(Real));
    for (index_t r = 0; r < block.rows; ++r) part.state[r] = s.state[r];
  }

  void merge(const Block& block, const Partial& part, const Scratch& s) const {
    for (index_t r = 0; r < block.rows; ++r) {
      Real factor, factor_part;
      s.state[r].merge(part.state[r], factor, factor_part);
      Real* const o = s.o + r * plan_.o_stride;
      const Real* const from = part.o + r * plan_.o_stride;
      for (index_t n = 0; n < plan_.o_stride; n += W)
        Simd::store(o + n, fma(Simd::load(from + n), V(factor_part), Simd::load(o + n) * V(factor)));
    }
  }

  void finish(const Block& block, const Scratch& s) const {
    each_run(block, [&](index_t r, index_t count) {
      const index_t lse = p_.lse_offset(block.b, block.head(r)) + block.query(r);
      const index_t lse_step = block.heads == 1 ? 1 : p_.lse_offset(block.b, 1) - p_.lse_offset(block.b, 0);
      constexpr index_t kMost = RowEnds<Real>::kRows;
      for (index_t n = 0; n < count; n += kMost) {
        const RowEnds<Real> ends = ends_of(block, r + n, min_of(kMost, count - n), s);
        ends.store_lse(static_cast<Real*>(f_.lse) + lse + n * lse_step, lse_step);
        plan_.store_out(s.o + (r + n) * plan_.o_stride, plan_.o_stride, ends.factor, ends.rows, p_.Dv,
                        row_of(block, f_.out, r + n), row_step(block, f_.out));
      }
    });
  }

  RowEnds<Real> ends_of(const Block& block, index_t r, index_t rows, const Scratch& s) const {
    Real factor[RowEnds<Real>::kRows];
    for (index_t n = 0; n < rows; ++n) factor[n] = Real(p_.dropout.keep_scale);
    for (index_t n = 0; p_.sink && n < rows; ++n) {
      // The sink is one more key, of value 0.
      const SoftmaxState<Real> sink{sink_log2<Target>(p_, block.head(r + n)), Real(1)};
      Real of_sum, unused;
      if (sink.m == -std::numeric_limits<Real>::infinity()) continue;
      s.state[r + n].merge(sink, of_sum, unused);
      factor[n] *= of_sum;
    }
    return {s.state + r, factor, rows};
  }

  const ForwardProblem& f_;
  const Problem& p_;
  const Executor& executor_;
  const Units& units_;
  const ForwardPlan<Target> plan_;
  const ForwardAhead<Target> ahead_;
  const ForwardStrips<Target> strips_;
  const ForwardLanes<Target> lanes_;
  const ForwardDirect<Target> direct_;
};

// Each approach runs over those of the sequences that it is for.
template <class Target>
void forward(const ForwardProblem& f, const Sequences& sequences, const Executor& executor) {
  index_t least = max_of<index_t>(1, sequences.rows.begin);
  for (const Approach approach : {Approach::direct, Approach::in_place, Approach::packed}) {
    // S_dmask takes a second walk over packed keys.
    const index_t most = f.s_dmask && approach != Approach::packed ? 0 : most_rows<Target>(approach);
    Sequences of_approach = sequences;
    of_approach.rows = {least, min_of(most, sequences.rows.end - 1) + 1};
    const Units units(f.problem, of_approach);
    if (units.count() > 0) Forward<Target>(f, executor, approach, units).run();
    if (approach != Approach::packed) least = max_of(least, most + 1);
  }
}

}  // namespace flash_attn::cpu
