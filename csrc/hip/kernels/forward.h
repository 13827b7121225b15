// Forward pass: FlashAttention-2, Algorithm 1. A block of waves shares the key tiles; every wave keeps its own queries.
#pragma once

#include "hip/kernels/dropout.h"
#include "hip/kernels/key_storage.h"
#include "hip/kernels/slack.h"
#include "hip/kernels/softmax.h"

namespace flash_attn::gpu {

// Plan: one row of the manifest.
template <class Plan>
class Forward {
  using Engine = typename Plan::Engine;
  using T = typename Engine::Element;
  static constexpr int kKept = Plan::kKeptTiles, kWaveRows = kKept * Engine::kTile, kBlockRows = Plan::kBlockRows;
  static constexpr int kKeys = Plan::kStreamedRows, kThreads = Plan::kWaves * kWave;
  static constexpr bool kGeneral = Plan::kGeneral, kCache = Plan::kCache;
  static_assert(kBlockRows == Plan::kWaves * kWaveRows, "the manifest knows the rows of a block");
  using KTile = RowTile<Engine, kKeys, Plan::kD, kThreads>;
  using VTile = ColumnTile<Engine, kKeys, Plan::kDv, kThreads>;
  using Q = typename Plan::template Kept<Plan::kD>;
  using Scores = ScoreTiles<Engine, kKept, kKeys / Engine::kTile>;
  using Output = OutputTiles<Engine, kKept, Plan::kDv / Engine::kTile>;

 public:
  static constexpr int kLdsBytes = KTile::kBytes + VTile::kBytes + Plan::kWaves * Q::kBytesPerWave;

  FA_DEVICE static void run(const ForwardArgs& args, char* lds) {
    const AttentionArgs& a = args.attention;
    const int blocks = kCache ? a.tiles * args.splits.count : a.tiles;  // of a head
    const u32 unit = block_index() / u32(blocks);
    const int b = int(unit / u32(a.H)), h = int(unit % u32(a.H)), block = int(block_index() % u32(blocks));
    if (b == a.B) return clear_slack(args, h, block, blocks);
    const Span queries = query_span(a, b), keys = kCache ? stored_keys(a, args.keys, b) : key_span(a, b);
    // Late queries see most keys under a causal mask: their blocks start first.
    const int split = kCache ? block / a.tiles : 0, tile = block - split * a.tiles;
    const int first = (a.tiles - 1 - tile) * kBlockRows;
    if (first < queries.count) Forward(args, lds, b, h, queries, keys, first, split).attend();
  }

 private:
  FA_DEVICE Forward(const ForwardArgs& args, char* lds, int b, int h, Span queries, Span keys, int block_row, int split)
      : args_(args),
        a_(args.attention),
        b_(b),
        h_(h),
        queries_(queries),
        keys_(keys),
        block_row_(block_row),
        first_(block_row + wave_index() * kWaveRows),
        split_(split),
        rule_(score_rule(a_, b, h, queries.count, keys.count)),
        regular_(!kGeneral || a_.regular),
        k_(lds),
        v_(lds + KTile::kBytes),
        q_(lds + KTile::kBytes + VTile::kBytes) {}

  FA_DEVICE void attend() {
    const Tiles tiles = key_tiles();
    const DropoutRule dropout = kGeneral ? dropout_rule(a_) : DropoutRule{};
    o_.clear();
    softmax_.clear();
    if (tiles.begin < tiles.end) {
      q_.template fetch<kGeneral>(
          rows_of<T>(a_.q, b_, h_, queries_, min_of(first_, queries_.count - 1), a_.D, regular_));
      k_.template fetch<kGeneral>(k_rows(tiles.begin));
      k_.commit();
      barrier();
    }
    // Decoding has queries for one wave: the others load.
    if (kCache && Plan::kWaves > 1 && first_ >= queries_.count) return stream<false>(tiles, dropout);
    stream<true>(tiles, dropout);
    write(dropout.active ? a_.keep_scale : 1.0f);
  }

  // Tiles of keys that the block's queries see, or this range of them.
  struct Tiles {
    int begin, end;
  };
  FA_DEVICE Tiles key_tiles() const {
    const Range keys = rule_.visible_keys(Range{block_row_, min_of(block_row_ + kBlockRows, queries_.count)});
    const int begin = int(keys.begin) / kKeys, end = int(ceil_div(keys.end, kKeys));
    if (!kCache) return {begin, end};
    const u32 splits = u32(args_.splits.count);
    const int each = int((u32(max_of(end - begin, 0)) + splits - 1) / splits), first = begin + split_ * each;
    return {first, min_of(first + each, end)};
  }

  template <bool kHasQueries>
  FA_DEVICE void stream(Tiles tiles, const DropoutRule& dropout) {
    const Range all = keys_that_all_see();
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      v_.template fetch<kGeneral>(v_rows(tile));
      Scores s;
      if (kHasQueries) weigh(s, tile, all, dropout);
      v_.commit();
      barrier();  // V is there, K has been read.
      k_.template fetch<kGeneral>(k_rows(min_of(tile + 1, tiles.end - 1)));
      if (kHasQueries) o_.add_products(s, v_);
      k_.commit();
      barrier();  // K is there, V has been read.
    }
  }

  // What a tile's values are multiplied with.
  FA_DEVICE void weigh(Scores& s, int tile, Range all, const DropoutRule& dropout) {
    s.clear();
    s.template add_products<Plan::kD>(k_, q_);
    const float unit = transform(s, tile);
    const int first_key = tile * kKeys;
    if (!(all.begin <= first_key && first_key + kKeys <= all.end))
      s.mask(first_key, [&](int row) { return rule_.visible_keys(first_ + row); }, -kInf);
    softmax_.step(s, o_, unit);
    if (kGeneral && dropout.active) drop_streamed_keys(s, dropout, b_, h_, first_, first_key);
  }

  FA_DEVICE Rows<T> k_rows(int tile) const { return key_rows(a_.k, tile, a_.D); }
  FA_DEVICE Rows<T> v_rows(int tile) const { return key_rows(a_.v, tile, a_.Dv); }
  FA_DEVICE Rows<T> key_rows(const TensorArg& x, int tile, int features) const {
    const int head = h_ / (a_.H / a_.Hk), first = tile * kKeys;
    if constexpr (kCache) return stored_rows<T>(args_.keys, x, b_, head, keys_, first, features, regular_);
    return rows_of<T>(x, b_, head, keys_, first, features, regular_);
  }

  // Keys that every query of the wave sees: their tiles need no mask.
  FA_DEVICE Range keys_that_all_see() const {
    const int last = min_of(first_ + kWaveRows, queries_.count) - 1;
    return {rule_.visible_keys(last).begin, rule_.visible_keys(first_).end};
  }

  // Dot products to scores. Returns what they still have to be multiplied with.
  FA_DEVICE float transform(Scores& s, int tile) const {
    if (!kGeneral) return rule_.scale_log2;
    const int diagonal = first_ + int(rule_.Sk - rule_.Sq) - tile * kKeys;
    s.update(
        [&](float dot, int query, int key) { return rule_.logit(Score(dot), Score(float(diagonal + query - key))).x; });
    return 1.0f;
  }

  FA_DEVICE void write(float keep_scale) {
    const bool split = kCache && args_.splits.count > 1;
    const index_t row_of_lse = lse_offset(a_, b_, h_, queries_) + (split ? split_ * args_.splits.rows : 0);
    float* const lse = (split ? args_.splits.lse : args_.lse) + row_of_lse;
    softmax_.finish();
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < Engine::kKeptPerLane; ++slot) {
      o_.scale(kept, slot, softmax_.factor(kept, slot) * keep_scale);
      const int row = first_ + kept * Engine::kTile + Engine::kept_of_slot(slot) + Engine::kept_of_lane();
      if (row < queries_.count && Engine::streamed_of_lane() == 0)
        lse[row] = softmax_.lse(kept, slot, split ? -kInf : kInf);
    }
    if (split)
      o_.write(Rows<float>{args_.splits.out + (row_of_lse + first_) * a_.Dv, a_.Dv, queries_.count - first_, a_.Dv,
                           a_.Dv % 4 == 0});
    else
      o_.write(rows_of<T>(args_.out, b_, h_, queries_, first_, a_.Dv, regular_));
  }

  FA_DEVICE static void clear_slack(const ForwardArgs& args, int h, int part, int parts) {
    const AttentionArgs& a = args.attention;
    for_each_slack_row(a.cu_seqlens_q, a.B, a.Tq, a.Sq, part, parts, kThreads, [&](int row, int thread, int threads) {
      const index_t row_of_lse = index_t(h) * a.Tq + row;
      if (kCache && args.splits.count > 1) {
        for (int n = thread; n < args.splits.count; n += threads)
          args.splits.lse[n * args.splits.rows + row_of_lse] = -kInf;
        return;
      }
      clear_row<T>(args.out, row, h, a.Dv, thread, threads);
      if (thread == 0) args.lse[row_of_lse] = kInf;
    });
  }

  const ForwardArgs& args_;
  const AttentionArgs& a_;
  int b_, h_;
  Span queries_, keys_;
  int block_row_, first_;  // of the block, of the wave
  int split_;
  ScoreRule<float> rule_;
  bool regular_;
  KTile k_;
  VTile v_;
  Q q_;
  Output o_;
  OnlineSoftmax<Engine, kKept> softmax_;
};

}  // namespace flash_attn::gpu
