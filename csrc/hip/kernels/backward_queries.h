// Backward pass, dQ: stationary in the queries, so that no two blocks add to the same row and no atomics are needed.
// It computes the scores a second time: 7 products for all gradients instead of 5.
#pragma once

#include "hip/kernels/gradient.h"
#include "hip/kernels/output.h"
#include "hip/kernels/slack.h"

namespace flash_attn::gpu {

template <class Plan>
class BackwardDq {
  using Engine = typename Plan::Engine;
  using T = typename Engine::Element;
  static constexpr int kKept = Plan::kKeptTiles, kWaveRows = kKept * Engine::kTile, kBlockRows = Plan::kBlockRows;
  static constexpr int kKeys = Plan::kStreamedRows, kThreads = Plan::kThreads, kStreamed = kKeys / Engine::kTile;
  static constexpr bool kGeneral = Plan::kGeneral;
  static_assert(kBlockRows == Plan::kWaves * kWaveRows, "the manifest knows the rows of a block");
  using KTile = StreamTile<Engine, kKeys, Plan::kD, kThreads, Use::both>;
  using VTile = StreamTile<Engine, kKeys, Plan::kDv, kThreads, Use::rows>;
  using Q = typename Plan::template Kept<Plan::kD>;
  using Dout = typename Plan::template Kept<Plan::kDv>;
  using Scores = ScoreTiles<Engine, kKept, kStreamed>;
  using Bits = KeepBits<Engine, kKept, kStreamed>;
  static constexpr int kVAt = KTile::kBytes, kQAt = kVAt + VTile::kBytes,
                       kDoutAt = kQAt + Plan::kWaves * Q::kBytesPerWave;

 public:
  static constexpr int kLdsBytes = kDoutAt + Plan::kWaves * Dout::kBytesPerWave;

  FA_DEVICE static void run(const BackwardArgs& args, char* lds) {
    const AttentionArgs& a = args.attention;
    const u32 block = block_index(), unit = block / u32(a.tiles);
    const int b = int(unit / u32(a.H)), h = int(unit % u32(a.H)), tile = int(block % u32(a.tiles));
    if (b == a.B)
      return for_each_slack_row(
          a.cu_seqlens_q, a.B, a.Tq, a.Sq, tile, a.tiles, kThreads,
          [&](int row, int thread, int threads) { clear_row<T>(args.dq, row, h, a.D, thread, threads); });
    const Span queries = query_span(a, b);
    // Late queries see most keys under a causal mask: their blocks start first.
    const int first = (a.tiles - 1 - tile) * kBlockRows;
    if (first < queries.count) BackwardDq(args, lds, b, h, queries, key_span(a, b), first).attend();
  }

 private:
  FA_DEVICE BackwardDq(const BackwardArgs& args, char* lds, int b, int h, Span queries, Span keys, int block_row)
      : args_(args),
        a_(args.attention),
        b_(b),
        h_(h),
        queries_(queries),
        keys_(keys),
        block_row_(block_row),
        first_(block_row + wave_index() * kWaveRows),
        rule_(score_rule(a_, b, h, queries.count, keys.count)),
        dropout_(kGeneral ? dropout_rule(a_) : DropoutRule{}),
        regular_(!kGeneral || a_.regular),
        k_(lds),
        v_(lds + kVAt),
        q_(lds + kQAt),
        dout_(lds + kDoutAt) {}

  FA_DEVICE void attend() {
    const Range block_keys = rule_.visible_keys(Range{block_row_, min_of(block_row_ + kBlockRows, queries_.count)});
    const int begin = int(block_keys.begin) / kKeys, end = int(ceil_div(block_keys.end, kKeys));
    const Range all = keys_that_all_see();
    dq_.clear();
    if (begin < end) {
      const int row = min_of(first_, queries_.count - 1);
      q_.template fetch<kGeneral>(rows_of<T>(a_.q, b_, h_, queries_, row, a_.D, regular_));
      dout_.template fetch<kGeneral>(rows_of<T>(args_.dout, b_, h_, queries_, row, a_.Dv, regular_));
      fetch_statistics();
      fetch(begin);
      commit();
      barrier();
    }
    for (int tile = begin; tile < end; ++tile) {
      fetch(min_of(tile + 1, end - 1));
      const int first_key = tile * kKeys;
      step(first_key, !(all.begin <= first_key && first_key + kKeys <= all.end));
      if (KTile::kCommitOverwrites) barrier();
      commit();
      barrier();
    }
    dq_.scale_all(a_.scale_log2 * float(kLn2));
    dq_.write(rows_of<T>(args_.dq, b_, h_, queries_, first_, a_.D, regular_));
  }

  FA_DEVICE void fetch(int tile) {
    const int hk = h_ / (a_.H / a_.Hk), first = tile * kKeys;
    k_.template fetch<kGeneral>(rows_of<T>(a_.k, b_, hk, keys_, first, a_.D, regular_));
    v_.template fetch<kGeneral>(rows_of<T>(a_.v, b_, hk, keys_, first, a_.Dv, regular_));
  }
  FA_DEVICE void commit() {
    k_.commit();
    v_.commit();
  }
  FA_DEVICE void fetch_statistics() {
    const index_t offset = lse_offset(a_, b_, h_, queries_);
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < Engine::kKeptPerLane; ++slot) {
      const int row = first_ + kept * Engine::kTile + Engine::kept_of_slot(slot) + Engine::kept_of_lane();
      const int inside = min_of(row, queries_.count - 1);
      lse_[kept][slot] = lse_to_log2(args_.lse[offset + inside]);
      delta_[kept][slot] = lse_[kept][slot] == kInf ? 0.0f : args_.delta[offset + inside];
    }
  }

  // Keys that every query of the wave sees: their tiles need no mask.
  FA_DEVICE Range keys_that_all_see() const {
    const int last = min_of(first_ + kWaveRows, queries_.count) - 1;
    return {rule_.visible_keys(last).begin, rule_.visible_keys(first_).end};
  }

  FA_DEVICE void step(int first_key, bool masked) {
    Scores s, ds;
    s.clear();
    s.template add_products<Plan::kD>(k_.rows(), q_);
    ds.clear();
    ds.template add_products<Plan::kDv>(v_.rows(), dout_);
    Bits bits;
    bits.keep_all();
    if (kGeneral && dropout_.active) bits.draw_streamed_keys(dropout_, b_, h_, first_, first_key);
    const int diagonal = first_ + int(rule_.Sk - rule_.Sq) - first_key;
    const int kept_lane = Engine::kept_of_lane(), streamed_lane = Engine::streamed_of_lane();
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int r = 0; r < Scores::kFlat; ++r) {
      const int slot = Engine::kept_slot(r);
      const int query = kept * Engine::kTile + Engine::kept_of_slot(slot) + kept_lane;
      const int key = Engine::streamed_of_register(r) + streamed_lane;
      ds.set(kept, r,
             score_gradient<kGeneral>(rule_, s.get(kept, r), float(diagonal + query - key), ds.get(kept, r),
                                      lse_[kept][slot], delta_[kept][slot], bits.keep(kept, r),
                                      dropout_.active ? a_.keep_scale : 1.0f)
                 .ds);
    }
    if (masked) ds.mask(first_key, [&](int row) { return rule_.visible_keys(first_ + row); }, 0.0f);
    dq_.add_products(ds, k_.columns());
  }

  const BackwardArgs& args_;
  const AttentionArgs& a_;
  int b_, h_;
  Span queries_, keys_;
  int block_row_, first_;  // of the block, of the wave
  ScoreRule<float> rule_;
  DropoutRule dropout_;
  bool regular_;
  KTile k_;
  VTile v_;
  Q q_;
  Dout dout_;
  float lse_[kKept][Engine::kKeptPerLane], delta_[kKept][Engine::kKeptPerLane];
  OutputTiles<Engine, kKept, Plan::kD / Engine::kTile> dq_;
};

}  // namespace flash_attn::gpu
