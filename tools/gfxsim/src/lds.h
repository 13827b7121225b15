// LDS of one workgroup, with a shadow that finds races and reads of what was never written.
//
// Two accesses of different waves to the same half word, one of them a write, are ordered only when the first was
// complete (waited for) when its wave arrived at a barrier that the second wave has passed. Every access has the number
// that its wave's stream of LDS operations gave it; those up to Wave::visible_to are ordered before what the other wave
// does now.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "wave.h"

namespace gfxsim {

enum class LdsAccess : std::uint8_t { read, write, atomic };

class Lds {
 public:
  void reset(std::uint32_t bytes, int waves);
  std::uint32_t bytes() const { return std::uint32_t(data_.size()); }
  std::uint8_t* data(std::uint32_t address) { return &data_[address]; }

  // Halves of the aligned word at `address` (bit 0: low) that hold defined values; 3 for both.
  unsigned defined(std::uint32_t word) const { return shadow_[word].defined; }
  void set_defined(std::uint32_t word, unsigned halves, unsigned defined) {
    shadow_[word].defined = std::uint8_t((shadow_[word].defined & ~halves) | (defined & halves));
  }

  // Notes an access of `wave` to `halves` of a word, numbered `number` in its stream (DMA: the stream of loads).
  // Returns the wave that it races with, or -1.
  int access(const std::vector<std::unique_ptr<Wave>>& waves, const Wave& wave, std::uint32_t word, unsigned halves,
             LdsAccess kind, std::uint32_t number, bool dma);

 private:
  struct Record {  // of one half word: the last write that is no atomic
    std::uint32_t number = 0;
    std::uint8_t wave = 0;
    bool dma = false, written = false;
  };
  struct Shadow {
    Record last[2];
    std::uint8_t defined = 0;
  };
  int unordered_atomic(const std::vector<std::unique_ptr<Wave>>& waves, const Wave& wave, std::uint32_t word) const;
  static bool ordered(const Wave& owner, const Wave& now, std::uint32_t number, bool dma);

  std::vector<std::uint8_t> data_;
  std::vector<Shadow> shadow_;
  std::vector<std::uint32_t> readers_;  // [word][wave]: number of the last read << 2 | halves
  // [word][wave]: number of the last atomic; empty until there is one. Atomics of several waves need no order among
  // them, so each of them has to be ordered before another access.
  std::vector<std::uint32_t> atomics_;
  int waves_ = 1;
};

}  // namespace gfxsim
