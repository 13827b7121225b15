// The sizes that a backward call settles once: its tiles, how it is cut into tasks, and where things are in memory.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/backward_block.h"
#include "cpu/gemm.h"
#include "cpu/score_gradients.h"
#include "cpu/score_tables.h"
#include "cpu/units.h"
#include "cpu/workspace.h"

namespace flash_attn::cpu {

template <class Target>
struct BackwardPlan {
  using Elem = typename Target::Elem;
  using Real = typename Target::Real;
  using QueryBlock = BackwardBlock<Target>;
  using Scratch = BackwardScratch<Target>;
  using State = BackwardBlockState<Target>;
  using Sums = KeySums<Target>;
  static constexpr index_t W = Target::Simd::W, kStep = Target::Format::kStep, kRows = Target::kRows;
  static constexpr index_t kDepth = Target::kDepth, kWidth = Target::kWidth, kParts = Target::kParts;
  static constexpr index_t kOfSum = kStepsPerSum<Target> * kStep;  // Queries whose products are one sum.
  static constexpr bool kInPlace = std::is_same_v<Elem, Real>;

  BackwardPlan(const Problem& problem, const Sequences& sequences, const Executor& given)
      : p(problem),
        executor(given),
        units(p, sequences),
        addend(p),
        whole(backward_tiles(p.D, p.Dv, Target::kSize, kRows, addend_per_query(p))),
        large(units.put_last([&](double alike, index_t k_len) { return too_few(alike, k_len); })),
        rest(shares_rest()),
        parts(!Target::kTiled && (large > 0 || rest) ? ceil_div(whole.queries, kOfSum) : 1),
        tiles(tiles_of_parts()),
        pitch(gradient_pitch<Target>(tiles)),
        depth(round_up(p.D, kDepth)),
        v_depth(round_up(p.Dv, kDepth)),
        stride(round_up(p.D, kWidth)),
        v_stride(round_up(p.Dv, kWidth)),
        query_blocks(ceil_div(units.longest_q(), tiles.queries)),
        key_blocks(ceil_div(units.longest_k(), tiles.keys)),
        most_chunks(find_most_chunks()),
        split(most_chunks > 1 && (large > 0 || rest)),
        block_bytes(carve_block(nullptr).bytes) {}

  struct Wave {
    index_t units, blocks;  // Query blocks that have memory.
    int workers;
  };
  struct Memory {
    char *blocks, *scratch, *sums;  // Of each block, worker and, if split, key block.
    State* states;
    index_t scratch_bytes, sums_bytes, bytes;
  };

  // Whether tasks of a (unit, key block) each would leave threads idle, of so many units with so many keys.
  bool too_few(double of_units, index_t k_len) const {
    return of_units * double(ceil_div(k_len, whole.keys)) < 2 * executor.num_threads;
  }
  // Whether those units are shared that are left when each thread has had as many. Their key blocks would go at the
  // pace of the first one, with which they share dQ: under a causal mask the slowest. It pays where nothing has to be
  // cut for it, or where they are too few.
  bool shares_rest() const {
    constexpr index_t kMostRounds = 4;
    const index_t threads = executor.num_threads, left = units.count() % threads;
    const bool pays = whole.queries <= kOfSum ? p.group() > 1 : too_few(double(left), units.longest_k());
    return !Target::kTiled && large == 0 && left > 0 && pays && units.count() < kMostRounds * threads;
  }
  // Of the units of a wave, those that no worker has for itself: their tasks are for whoever has time.
  index_t shared(Range wave, index_t workers) const {
    const index_t n = wave.end - wave.begin;
    if (n < workers) return n;
    if (!split) return 0;
    return large > 0 ? min_of(n, max_of<index_t>(0, wave.end - (units.count() - large))) : n % workers;
  }
  index_t unit_tasks() const { return key_blocks * (split ? most_chunks : 1); }

  // The most query blocks that have memory at a time, if all units are one wave, whose last ones are large. Workers on
  // units of their own hold one unit each, whatever the number of units; who has none left is at those that are shared.
  index_t blocks_in_work(index_t own) const {
    const index_t left = split && large == 0 ? max_of<index_t>(0, units.count() % executor.num_threads - 1) : 0;
    std::vector<index_t> of_own;
    index_t blocks = 0;
    for (index_t unit = 0; unit < units.count(); ++unit) {
      const index_t of_unit = blocks_of(p.sequence(units.b(unit)));
      if (unit < own)
        of_own.push_back(of_unit);
      else
        blocks += of_unit;
    }
    std::sort(of_own.begin(), of_own.end(), std::greater<>());
    const std::size_t at_once = std::min(of_own.size(), static_cast<std::size_t>(executor.num_threads + left));
    for (std::size_t n = 0; n < at_once; ++n) blocks += of_own[n];
    return blocks;
  }

  Wave plan_wave() const {
    const index_t per_unit = unit_blocks(), threads = executor.num_threads;
    const index_t own = units.count() - large;
    const index_t held = max_of(threads, blocks_in_work(own));  // Each may be at a block whose rows see no keys.
    const bool one_each =
        units.count() >= threads && !(split && own == 0) && Units::quick_to_allocate(held * block_bytes);
    Wave w{};
    w.units = one_each ? units.count() : units.wave(per_unit * block_bytes, unit_tasks(), threads);
    w.blocks = one_each ? held : w.units * per_unit;
    w.workers = worker_count(executor, w.units * max_of(per_unit, unit_tasks()));
    return w;
  }
  Memory carve(const Wave& wave, char* base) const {
    Carver c(base);
    Memory m{};
    m.scratch_bytes = carve_scratch(nullptr).bytes;
    m.sums_bytes = carve_sums(nullptr).bytes;
    m.blocks = c.take<char>(wave.blocks * block_bytes);
    m.scratch = c.take<char>(wave.workers * m.scratch_bytes);
    const index_t most_shared = min_of(wave.units, max_of<index_t>(large, wave.workers - 1));
    m.sums = c.take<char>(split ? most_shared * key_blocks * m.sums_bytes : 0);
    m.states = c.take<State>(wave.units * unit_blocks());
    m.bytes = c.used();
    return m;
  }

  Tiles tiles_of_parts() const {
    Tiles t = whole;
    t.queries = min_of(t.queries / parts, round_up(max_of<index_t>(units.longest_q(), 1), kKeyAlign));
    return t;
  }

  // Calls work(head, block) for query blocks of a group of heads, each of which has `of_head`, in the order in which
  // they meet a key block, until it returns true; whether it did. Last to first, those of all heads one after another,
  // so that no task that sees fewer of them, under a causal mask, waits for one that sees more; but the parts of one
  // that is cut for the threads' sake in the order in which its products would sum them. Tiles, of whose blocks a chunk
  // is many, meet them head by head, so that chunks see as much: blocks of all heads in turn were 10 % slower there.
  // `ahead` uncut blocks, the first ones, come before the last one.
  template <class Work>
  FA_INLINE bool any_in_order(Range chunk, index_t of_head, index_t ahead, const Work& work) const {
    const index_t group = p.group(), uncut = ceil_div(of_head, parts), last = of_head - (uncut - 1) * parts;
    const auto nth = [&](index_t n) {
      if (Target::kTiled) return work(n / of_head, (2 * of_head - 1 - n % of_head + ahead) % of_head);
      const auto of_block = [&](index_t block, index_t of, index_t m) { return work(m / of, block * parts + m % of); };
      const index_t whole = group * parts;
      if (n < ahead * whole) return of_block(ahead - 1 - n / whole, parts, n % whole);
      n -= ahead * whole;
      if (n < group * last) return of_block(uncut - 1, last, n);
      n -= group * last;
      return of_block(uncut - 2 - n / whole, parts, n % whole);
    };
    for (index_t n = chunk.begin; n < chunk.end; ++n)
      if (nth(n)) return true;
    return false;
  }
  // How many uncut blocks of a key head come before the last one. Where there is one key block, each query block's dq
  // is stored at once, and threads that walk the same rows of many heads at the same pace would all make the same fresh
  // pages (docs/cpu-products.md): each key head begins elsewhere.
  index_t blocks_ahead(const Sequence& sequence, index_t hk) const {
    const index_t uncut = ceil_div(ceil_div(sequence.q_len, tiles.queries), parts);
    return sequence.k_len <= tiles.keys ? hk * uncut / p.Hk : 0;
  }
  index_t unit_blocks() const { return p.group() * query_blocks; }
  index_t blocks_of(const Sequence& sequence) const { return p.group() * ceil_div(sequence.q_len, tiles.queries); }
  index_t chunks_of(const Sequence& sequence) const {
    return chunks_of_blocks<Target>(blocks_of(sequence), ceil_div(sequence.k_len, tiles.keys), tiles.queries);
  }
  index_t find_most_chunks() const {
    index_t most = 1;
    for (index_t b = 0; b < p.B; ++b) most = max_of(most, chunks_of(p.sequence(b)));
    return most;
  }

  QueryBlock carve_block(char* base) const {
    Carver c(base);
    QueryBlock q{};
    const index_t n = tiles.queries;
    q.q_transposed = c.take<Elem>(kParts * n * depth);
    q.dout_transposed = c.take<Elem>(kParts * n * v_depth);
    q.q_direct = c.take<Elem>(kParts * n * stride);
    q.dout_direct = c.take<Elem>(kParts * n * v_stride);
    q.lse_log2 = c.take<Real>(n);
    q.delta = c.take<Real>(n);
    q.dq = c.take<Real>(round_up(n, kRows) * stride);
    q.bytes = c.used();
    return q;
  }
  Scratch carve_scratch(char* base) const {
    Carver c(base);
    Scratch s{};
    const index_t keys = round_up(tiles.keys, kRows), queries = tiles.queries;
    s.staging = c.take<Elem>(kParts * Panels<Target>::kPanel * max_of(stride, v_stride));
    s.k = c.take<Elem>(kParts * keys * stride);
    s.v = c.take<Elem>(kParts * keys * v_stride);
    s.k_direct = c.take<Elem>(kParts * keys * stride);
    s.loaded = c.take<index_t>(1);
    s.asks = c.take<RowsInTurn>(1);
    s.sums = take_sums(c);
    if (split || (Target::kTiled && most_chunks > 1)) s.chunk = take_sums(c);
    s.scores = c.take<Real>(kRows * pitch);
    s.dp = c.take<Real>(kRows * pitch);
    s.p_rows = kInPlace ? reinterpret_cast<Elem*>(s.scores) : c.take<Elem>(kParts * kRows * queries);
    s.ds_rows = kInPlace ? reinterpret_cast<Elem*>(s.dp) : c.take<Elem>(kParts * kRows * queries);
    s.ds = c.take<Elem>(ScoreGradients<Target>::elems(keys, queries));
    s.dropout = c.take<std::uint8_t>(round_up(keys, 64) * queries / 8);  // Strips read bits of rows past the keys.
    s.addend = addend.columns_given() ? c.take<Real>(tiles.keys * (addend.columns_differ() ? queries : 1)) : nullptr;
    s.addend_rows = c.take<Real>(addend.columns_differ() ? W * tiles.keys : 0);
    s.bytes = c.used();
    return s;
  }

  Sums take_sums(Carver& c) const {
    const index_t keys = round_up(tiles.keys, kRows);
    Sums s{};
    s.dk = c.take<Real>(keys * stride);
    s.dv = c.take<Real>(keys * v_stride);
    s.k_stride = stride, s.v_stride = v_stride;
    return s;
  }
  Sums carve_sums(char* base) const {
    Carver c(base);
    Sums s = take_sums(c);
    s.turn = c.take<std::atomic<index_t>>(1);
    s.bytes = c.used();
    return s;
  }

  const Problem& p;
  const Executor& executor;
  Units units;
  const Addend<Target> addend;
  const Tiles whole;  // Before parts.
  // Where units have several chunks, the last so many are shared, as threads that had them alone would be the last to
  // end; or those that are left when each thread has had as many.
  const index_t large;
  const bool rest;
  const index_t parts;  // Blocks that a query block is cut into, as many as its products make sums.
  const Tiles tiles;
  const index_t pitch;  // Of scores and dp.
  const index_t depth, v_depth, stride, v_stride;
  const index_t query_blocks, key_blocks, most_chunks;
  const bool split;  // Tasks of shared units are of a chunk of query blocks each, and share the sums of a key block.
  const index_t block_bytes;
};

}  // namespace flash_attn::cpu
