// Backward pass, dK and dV: FlashAttention-2, Algorithm 2, stationary in the keys.
//
// A block of waves shares the query tiles, every wave keeps its own keys and their dK and dV. The block walks all query
// heads of its key head, so nothing is expanded and nothing is added by atomics. Where registers do not hold dK and dV
// together, two kernels make one each.
#pragma once

#include "hip/kernels/gradient.h"
#include "hip/kernels/output.h"
#include "hip/kernels/slack.h"

namespace flash_attn::gpu {

template <class Plan, bool kWithDk, bool kWithDv>
class BackwardKeys {
  using Engine = typename Plan::Engine;
  using T = typename Engine::Element;
  static constexpr int kKept = Plan::kKeptTiles, kWaveRows = kKept * Engine::kTile, kBlockRows = Plan::kBlockRows;
  static constexpr int kQueries = Plan::kStreamedRows, kThreads = Plan::kThreads;
  static constexpr int kStreamed = kQueries / Engine::kTile, kRun = min_of(4, Engine::kRun);
  static constexpr bool kGeneral = Plan::kGeneral;
  static_assert(kBlockRows == Plan::kWaves * kWaveRows, "the manifest knows the rows of a block");
  using QTile = StreamTile<Engine, kQueries, Plan::kD, kThreads, kWithDk ? Use::both : Use::rows>;
  using DoutTile = StreamTile<Engine, kQueries, Plan::kDv, kThreads,
                              !kWithDv  ? Use::rows
                              : kWithDk ? Use::both
                                        : Use::columns>;
  using Statistics = QueryStatistics<kQueries>;
  using K = typename Plan::template Kept<Plan::kD>;
  using V = typename Plan::template Kept<Plan::kDv>;
  using Scores = ScoreTiles<Engine, kKept, kStreamed>;
  using Bits = KeepBits<Engine, kKept, kStreamed>;
  using Dk = OutputTiles<Engine, kKept, kWithDk ? Plan::kD / Engine::kTile : 1>;
  using Dv = OutputTiles<Engine, kKept, kWithDv ? Plan::kDv / Engine::kTile : 1>;
  static constexpr int kDoutAt = QTile::kBytes, kStatisticsAt = kDoutAt + DoutTile::kBytes,
                       kKAt = kStatisticsAt + Statistics::kBytes, kVAt = kKAt + Plan::kWaves * K::kBytesPerWave;

 public:
  static constexpr int kLdsBytes = kVAt + (kWithDk ? Plan::kWaves * V::kBytesPerWave : 0);

  FA_DEVICE static void run(const BackwardArgs& args, char* lds) {
    const AttentionArgs& a = args.attention;
    const u32 block = block_index(), unit = block / u32(a.tiles);
    const int b = int(unit / u32(a.Hk)), hk = int(unit % u32(a.Hk)), tile = int(block % u32(a.tiles));
    if (b == a.B) return clear_slack(args, hk, tile);
    // Early keys are seen by most queries under a causal mask: their blocks start first.
    const int first = tile * kBlockRows;
    const Span keys = key_span(a, b);
    if (first < min_of(keys.count, a.Sk)) BackwardKeys(args, lds, b, hk, query_span(a, b), keys, first).attend();
  }

 private:
  FA_DEVICE BackwardKeys(const BackwardArgs& args, char* lds, int b, int hk, Span queries, Span keys, int block_row)
      : args_(args),
        a_(args.attention),
        b_(b),
        hk_(hk),
        queries_(queries),
        keys_{keys.begin, min_of(keys.count, a_.Sk)},
        block_row_(block_row),
        first_(block_row + wave_index() * kWaveRows),
        rule_(score_rule(a_, b, hk * (a_.H / a_.Hk), queries.count, keys.count)),
        dropout_(kGeneral ? dropout_rule(a_) : DropoutRule{}),
        regular_(!kGeneral || a_.regular),
        q_(lds),
        dout_(lds + kDoutAt),
        statistics_(lds + kStatisticsAt),
        k_(lds + kKAt),
        v_(lds + kVAt) {}

  FA_DEVICE void attend() {
    const Range seen_by = rule_.visible_queries(Range{block_row_, min_of(block_row_ + kBlockRows, keys_.count)});
    const int begin = int(seen_by.begin) / kQueries, end = int(ceil_div(seen_by.end, kQueries));
    const int heads_end = (hk_ + 1) * (a_.H / a_.Hk);
    const Range all = queries_that_see_all();
    dk_.clear();
    dv_.clear();
    if (begin < end) {
      const int row = min_of(first_, keys_.count - 1);
      k_.template fetch<kGeneral>(rows_of<T>(a_.k, b_, hk_, keys_, row, a_.D, regular_));
      if (kWithDk) v_.template fetch<kGeneral>(rows_of<T>(a_.v, b_, hk_, keys_, row, a_.Dv, regular_));
      fetch(hk_ * (a_.H / a_.Hk), begin);
      commit();
      barrier();
    }
    int head = hk_ * (a_.H / a_.Hk), tile = begin;
    while (begin < end && head < heads_end) {
      const bool wraps = tile + 1 == end;
      const int next_head = wraps ? head + 1 : head, next_tile = wraps ? begin : tile + 1;
      fetch(min_of(next_head, heads_end - 1), next_tile);
      const int first_query = tile * kQueries;
      step(head, first_query, !(all.begin <= first_query && first_query + kQueries <= all.end));
      if (QTile::kCommitOverwrites) barrier();
      commit();
      barrier();
      head = next_head, tile = next_tile;
    }
    write();
  }

  FA_DEVICE void fetch(int head, int tile) {
    const int first = tile * kQueries;
    q_.template fetch<kGeneral>(rows_of<T>(a_.q, b_, head, queries_, first, a_.D, regular_));
    dout_.template fetch<kGeneral>(rows_of<T>(args_.dout, b_, head, queries_, first, a_.Dv, regular_));
    const index_t offset = lse_offset(a_, b_, head, queries_);
    statistics_.fetch(args_.lse + offset, args_.delta + offset, first, queries_.count);
  }
  FA_DEVICE void commit() {
    q_.commit();
    dout_.commit();
    statistics_.commit();
  }

  // Queries that see every key of the wave: their tiles need no mask.
  FA_DEVICE Range queries_that_see_all() const {
    const int last = min_of(first_ + kWaveRows, keys_.count) - 1;
    return {rule_.visible_queries(last).begin, rule_.visible_queries(first_).end};
  }

  FA_DEVICE void step(int head, int first_query, bool masked) {
    Scores p, ds;
    p.clear();
    p.template add_products<Plan::kD>(q_.rows(), k_);
    ds.clear();
    if constexpr (kWithDk) ds.template add_products<Plan::kDv>(dout_.rows(), v_);
    differentiate(p, ds, head, first_query);
    if (masked) {
      const auto seen_by = [&](int row) { return rule_.visible_queries(first_ + row); };
      p.mask(first_query, seen_by, 0.0f);
      if constexpr (kWithDk) ds.mask(first_query, seen_by, 0.0f);
    }
    if constexpr (kWithDv) dv_.add_products(p, dout_.columns());
    if constexpr (kWithDk) dk_.add_products(ds, q_.columns());
  }

  // p: dot products to P; ds: dP to dS.
  FA_DEVICE void differentiate(Scores& p, Scores& ds, int head, int first_query) {
    Bits bits;
    bits.keep_all();
    if (kGeneral) {
      if (a_.alibi_slopes) rule_.slope_log2 = alibi_slope_log2(a_, b_, head);
      if (dropout_.active) bits.draw_kept_keys(dropout_, b_, head, first_query, first_);
    }
    const int kept_lane = Engine::kept_of_lane(), streamed_lane = Engine::streamed_of_lane();
    const int diagonal = first_query + int(rule_.Sk - rule_.Sq) - first_;
    FA_UNROLL
    for (int r = 0; r < Scores::kFlat; r += kRun) {
      const int query = Engine::streamed_of_register(r) + streamed_lane;
      const auto lse = statistics_.template lse<kRun>(query), delta = statistics_.template delta<kRun>(query);
      FA_UNROLL
      for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
      for (int i = 0; i < kRun; ++i) {
        const int key = kept * Engine::kTile + Engine::kept_of_slot(Engine::kept_slot(r + i)) + kept_lane;
        const ScoreGradient g =
            score_gradient<kGeneral>(rule_, p.get(kept, r + i), float(diagonal + query + i - key), ds.get(kept, r + i),
                                     lse[i], delta[i], bits.keep(kept, r + i), dropout_.active ? a_.keep_scale : 1.0f);
        p.set(kept, r + i, g.p);
        ds.set(kept, r + i, g.ds);
      }
    }
  }

  FA_DEVICE void write() {
    if constexpr (kWithDk) {
      dk_.scale_all(a_.scale_log2 * float(kLn2));
      dk_.write(rows_of<T>(args_.dk, b_, hk_, keys_, first_, a_.D, regular_));
    }
    if constexpr (kWithDv) {
      if (dropout_.active) dv_.scale_all(a_.keep_scale);
      dv_.write(rows_of<T>(args_.dv, b_, hk_, keys_, first_, a_.Dv, regular_));
    }
  }

  FA_DEVICE static void clear_slack(const BackwardArgs& args, int hk, int part) {
    const AttentionArgs& a = args.attention;
    for_each_slack_row(a.cu_seqlens_k, a.B, a.Tk, a.Sk, part, a.tiles, kThreads, [&](int row, int thread, int threads) {
      if (kWithDk) clear_row<T>(args.dk, row, hk, a.D, thread, threads);
      if (kWithDv) clear_row<T>(args.dv, row, hk, a.Dv, thread, threads);
    });
  }

  const BackwardArgs& args_;
  const AttentionArgs& a_;
  int b_, hk_;
  Span queries_, keys_;
  int block_row_, first_;  // of the block, of the wave
  ScoreRule<float> rule_;
  DropoutRule dropout_;
  bool regular_;
  QTile q_;
  DoutTile dout_;
  Statistics statistics_;
  K k_;
  V v_;
  Dk dk_;
  Dv dv_;
};

template <class Plan>
using BackwardDkDv = BackwardKeys<Plan, true, true>;
template <class Plan>
using BackwardDk = BackwardKeys<Plan, true, false>;
template <class Plan>
using BackwardDv = BackwardKeys<Plan, false, true>;

}  // namespace flash_attn::gpu
