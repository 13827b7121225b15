// A wave's scores: kept x streamed tiles of S in the engine's registers, and what the score rules do to them.
#pragma once

#include "hip/device/engine.h"
#include "hip/kernels/problem.h"

namespace flash_attn::gpu {

// kKept tiles of kept rows against kStreamed tiles of streamed rows.
template <class Engine, int kKept, int kStreamed>
struct ScoreTiles {
  static constexpr int kRegisters = Engine::kRegisters, kFlat = kStreamed * kRegisters;
  typename Engine::Accumulator s[kKept][kStreamed];

  // Register r of the streamed tiles counted through.
  FA_DEVICE float get(int kept, int r) const { return s[kept][r / kRegisters][r % kRegisters]; }
  FA_DEVICE void set(int kept, int r, float value) { s[kept][r / kRegisters][r % kRegisters] = value; }

  // f(kept tile, register, kept row, streamed row) -> the new value; rows count from the first tile's.
  template <class F>
  FA_DEVICE void update(F f) {
    const int kept_lane = Engine::kept_of_lane(), streamed_lane = Engine::streamed_of_lane();
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int r = 0; r < kFlat; ++r)
      set(kept, r,
          f(get(kept, r), kept * Engine::kTile + Engine::kept_of_slot(Engine::kept_slot(r)) + kept_lane,
            Engine::streamed_of_register(r) + streamed_lane));
  }

  // += streamed . kept, over all features.
  template <int kFeatures, class Streamed, class Kept>
  FA_DEVICE void add_products(const Streamed& streamed, const Kept& kept_rows) {
    constexpr int kSteps = kFeatures / Engine::kFeatureStep, kUnrolled = min_of(kSteps, Engine::kUnrolledSteps);
    const auto add = [&](int first) {
      load_and_use<kUnrolled * kStreamed>([&](int i) { return streamed.operand(i % kStreamed, first + i / kStreamed); },
                                          [&](int i, const auto& x) {
                                            FA_UNROLL
                                            for (int kept = 0; kept < kKept; ++kept)
                                              Engine::scores(s[kept][i % kStreamed], x,
                                                             kept_rows.operand(kept, first + i / kStreamed));
                                          });
    };
    if constexpr (kUnrolled == kSteps) {
      add(0);
    } else {
      FA_NO_UNROLL
      for (int first = 0; first < kSteps; first += kUnrolled) add(first);
    }
  }

  // Sets to `value` what a kept row does not see. seen(kept row) is the range of streamed rows that it does; streamed
  // rows of these tiles count from first_streamed.
  template <class F>
  FA_DEVICE void mask(int first_streamed, F seen, float value) {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int slot = 0; slot < Engine::kKeptPerLane; ++slot) {
      const Range visible = seen(kept * Engine::kTile + Engine::kept_of_slot(slot) + opaque(Engine::kept_of_lane()));
      const u32 begin = u32(visible.begin), count = u32(visible.end) - begin;
      const u32 row = u32(first_streamed + Engine::streamed_of_lane()) - begin;
      FA_UNROLL
      for (int r = 0; r < kFlat; ++r)
        if (Engine::kept_slot(r) == slot && row + u32(Engine::streamed_of_register(r)) >= count) set(kept, r, value);
    }
  }
  FA_DEVICE void clear() {
    FA_UNROLL
    for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
    for (int tile = 0; tile < kStreamed; ++tile) s[kept][tile] = Engine::zero();
  }
};

}  // namespace flash_attn::gpu
