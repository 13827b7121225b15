// Dropout on score tiles: which lane owns which bytes of which Philox call is explained in core/dropout.h.
#pragma once

#include "hip/kernels/scores.h"

namespace flash_attn::gpu {

// words.w[i] without an array in memory.
FA_DEVICE u32 pick(const PhiloxWords& words, int i) {
  const u32 even = i & 2 ? words.w[2] : words.w[0], odd = i & 2 ? words.w[3] : words.w[1];
  return i & 1 ? odd : even;
}

// f(kept tile, register, keep) for every score, keys being the streamed rows.
template <class Engine, int kKept, int kStreamed, class F>
FA_DEVICE void for_each_kept_byte(const DropoutRule& rule, int b, int h, int first_query, int first_key, F f) {
  constexpr int kFlat = kStreamed * Engine::kRegisters;
  const int lane_key = Engine::streamed_of_lane();
  FA_UNROLL
  for (int kept = 0; kept < kKept; ++kept) FA_UNROLL
  for (int slot = 0; slot < Engine::kKeptPerLane; ++slot) {
    const int query = first_query + kept * Engine::kTile + Engine::kept_of_slot(slot) + Engine::kept_of_lane();
    FA_UNROLL
    for (int block = 0; block < (kStreamed * Engine::kTile + 63) / 64; ++block) FA_UNROLL
    for (int sub = 0; sub < 4; ++sub) {
      constexpr auto in_call = [](int r, int slot, int block, int sub) {
        const int key = Engine::streamed_of_register(r);
        return Engine::kept_slot(r) == slot && key / 64 == block && key / 4 % 4 == sub;
      };
      bool used = false;
      FA_UNROLL
      for (int r = 0; r < kFlat; ++r) used |= in_call(r, slot, block, sub);
      if (!used) continue;
      // Tiles start at multiples of kStreamed * kTile keys, which may be less than 64.
      const int base = first_key + block * 64;
      const PhiloxWords words = rule.bytes(b, h, query, base / 64, sub + lane_key / 4);
      FA_UNROLL
      for (int r = 0; r < kFlat; ++r) {
        if (!in_call(r, slot, block, sub)) continue;
        const int key = Engine::streamed_of_register(r) % 64;
        const u32 word = pick(words, (base % 64 + key) / 16);
        f(kept, r, rule.keep(word >> (8 * ((key + lane_key) % 4)) & 255u));
      }
    }
  }
}

template <class Engine, int kKept, int kStreamed>
FA_DEVICE void drop_streamed_keys(ScoreTiles<Engine, kKept, kStreamed>& s, const DropoutRule& rule, int b, int h,
                                  int first_query, int first_key) {
  for_each_kept_byte<Engine, kKept, kStreamed>(rule, b, h, first_query, first_key, [&](int kept, int r, bool keep) {
    if (!keep) s.set(kept, r, 0.0f);
  });
}

}  // namespace flash_attn::gpu
