// A wave's output rows: O, dQ, dK or dV in the engine's accumulators.
#pragma once

#include "hip/kernels/scores.h"

namespace flash_attn::gpu {

// kKept tiles of kept rows by kTiles tiles of features.
template <class Engine, int kKept, int kTiles>
struct OutputTiles {
  typename Engine::Accumulator o[kKept][kTiles];

  FA_DEVICE void clear() {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) o[kept][tile] = Engine::zero();
  }

  // += weights . columns, over all streamed rows.
  template <int kStreamed, class Columns>
  FA_DEVICE void add_products(const ScoreTiles<Engine, kKept, kStreamed>& weights, const Columns& columns) {
    typename Engine::Weights packed[kKept];
    load_and_use<(kStreamed * Engine::kTile / Engine::kRowStep) * kTiles>(
        [&](int i) { return columns.operand(i % kTiles, i / kTiles); },
        [&](int i, const auto& x) {
          if (i % kTiles == 0) FA_UNROLL
          for (int kept = 0; kept < kKept; ++kept) packed[kept] = pack(weights, kept, i / kTiles);
          FA_UNROLL
          for (int kept = 0; kept < kKept; ++kept) Engine::accumulate(o[kept][i % kTiles], x, packed[kept]);
        });
  }
  template <int kStreamed>
  FA_DEVICE static typename Engine::Weights pack(const ScoreTiles<Engine, kKept, kStreamed>& weights, int kept,
                                                 int step) {
    float p[Engine::kPack];
    FA_UNROLL
    for (int i = 0; i < Engine::kPack; ++i) p[i] = weights.get(kept, step * Engine::kPack + i);
    return Engine::pack(p);
  }

  // Multiplies the lane's kept row `slot` of a tile.
  FA_DEVICE void scale(int kept, int slot, float factor) {
    FA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) FA_UNROLL
    for (int r = 0; r < Engine::kRegisters; ++r)
      if (Engine::kept_slot(r) == slot) o[kept][tile][r] *= factor;
  }

  FA_DEVICE void scale_all(float factor) {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < Engine::kKeptPerLane; ++slot) scale(kept, slot, factor);
  }

  // Writes the kept rows below `rows.count` and the features below `rows.features`.
  template <class T>
  FA_DEVICE void write(const Rows<T>& rows) const {
    constexpr int kRun = Engine::kRun;
    const int kept_lane = Engine::kept_of_lane(), feature_lane = Engine::streamed_of_lane();
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) FA_UNROLL
    for (int r = 0; r < Engine::kRegisters; r += kRun) {
      const int row = kept * Engine::kTile + Engine::kept_of_slot(Engine::kept_slot(r)) + kept_lane;
      const int feature = tile * Engine::kTile + Engine::streamed_of_register(r) + feature_lane;
      float run[kRun];
      FA_UNROLL
      for (int i = 0; i < kRun; ++i) run[i] = o[kept][tile][r + i];
      if (row < rows.count && feature < rows.features) store_run(rows, row, feature, run);
    }
  }
};

}  // namespace flash_attn::gpu
