#include "lds.h"

namespace gfxsim {

void Lds::reset(std::uint32_t bytes, int waves) {
  const std::uint32_t words = (bytes + 3) / 4;
  waves_ = waves;
  data_.assign(std::size_t(words) * 4, 0xcb);
  shadow_.assign(words, {});
  readers_.assign(std::size_t(words) * waves, 0);
  atomics_.clear();
}

bool Lds::ordered(const Wave& owner, const Wave& now, std::uint32_t number, bool dma) {
  // Within a wave LDS instructions execute in order; data on its way from global memory has to be waited for.
  if (&owner == &now) return !dma || number <= now.done[kLoads];
  return number <= owner.visible_to(now, dma);
}

int Lds::unordered_atomic(const std::vector<std::unique_ptr<Wave>>& waves, const Wave& wave, std::uint32_t word) const {
  int conflict = -1;
  if (atomics_.empty()) return conflict;
  const std::uint32_t* atomics = &atomics_[std::size_t(word) * waves_];
  for (int i = 0; i < waves_; ++i)
    if (i != wave.id && atomics[i] > waves[i]->visible_to(wave, false)) conflict = i;
  return conflict;
}

int Lds::access(const std::vector<std::unique_ptr<Wave>>& waves, const Wave& wave, std::uint32_t word, unsigned halves,
                LdsAccess kind, std::uint32_t number, bool dma) {
  const bool is_atomic = kind == LdsAccess::atomic;
  int conflict = is_atomic ? -1 : unordered_atomic(waves, wave, word);
  Shadow& shadow = shadow_[word];
  for (int half = 0; half < 2; ++half) {
    Record& last = shadow.last[half];
    if (!(halves >> half & 1)) continue;
    const bool same_stream = last.wave == wave.id && last.dma == dma;
    if (last.written && !same_stream && !ordered(*waves[last.wave], wave, last.number, last.dma)) conflict = last.wave;
    if (kind == LdsAccess::write) last = {number, std::uint8_t(wave.id), dma, true};
  }
  if (is_atomic) {
    if (atomics_.empty()) atomics_.assign(readers_.size(), 0);
    atomics_[std::size_t(word) * waves_ + wave.id] = number;
  }
  std::uint32_t* readers = &readers_[std::size_t(word) * waves_];
  if (kind == LdsAccess::read) {
    const std::uint32_t before = readers[wave.id];
    // A read of the other half that is not ordered yet stays noted too.
    const unsigned kept = before >> 2 > wave.visible_to(wave, false) ? before & 3 : 0;
    readers[wave.id] = number << 2 | halves | kept;
    return conflict;
  }
  for (int i = 0; i < waves_; ++i) {
    if (!(readers[i] & halves) || i == wave.id) continue;
    if (readers[i] >> 2 > waves[i]->visible_to(wave, false)) conflict = i;
  }
  if (dma && (readers[wave.id] & halves) && readers[wave.id] >> 2 > wave.done[kLds]) conflict = wave.id;
  return conflict;
}

}  // namespace gfxsim
