#include "bank_conflicts.h"

#include <algorithm>
#include <array>
#include <vector>

namespace gfxsim {
namespace {

// The phase of a lane. 16-byte reads of gfx9 are served in eight phases of eight lanes that are not consecutive:
// {0-3, 20-23} {4-7, 16-19} {8-11, 28-31} {12-15, 24-27}, and the same in the upper 32 lanes (AMD's Composable Kernel
// documentation on LDS bank conflicts). Everything else: consecutive lanes, as many as 128 bytes hold.
int phase_of(const Target& target, int lane, std::uint32_t bytes, bool is_read) {
  if (target.generation == 9 && bytes == 16 && is_read) {
    constexpr std::array<int, 8> phase_of_four = {0, 1, 2, 3, 1, 0, 3, 2};
    return phase_of_four[lane / 4 % 8] + 4 * (lane / 32);
  }
  const int lanes_per_phase = std::max(1, int(128 / std::max(bytes, 4u)));
  return lane / lanes_per_phase;
}

}  // namespace

LdsClocks lds_clocks(const Target& target, const std::uint32_t* address, std::uint64_t lanes, int wave_lanes,
                     std::uint32_t bytes, bool is_read) {
  LdsClocks clocks;
  std::array<std::vector<std::uint32_t>, 64> words;  // of each phase
  int phases = 0;
  for (int lane = 0; lane < wave_lanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const int phase = phase_of(target, lane, bytes, is_read);
    phases = std::max(phases, phase + 1);
    for (std::uint32_t at = address[lane] / 4; at <= (address[lane] + bytes - 1) / 4; ++at) words[phase].push_back(at);
  }
  for (int phase = 0; phase < phases; ++phase) {
    auto& of_phase = words[phase];
    if (of_phase.empty()) continue;
    std::sort(of_phase.begin(), of_phase.end());
    of_phase.erase(std::unique(of_phase.begin(), of_phase.end()), of_phase.end());
    std::vector<std::uint32_t> per_bank(std::size_t(target.lds_banks), 0);
    std::uint32_t busiest = 0;
    for (const std::uint32_t word : of_phase)
      busiest = std::max(busiest, ++per_bank[word % std::uint32_t(target.lds_banks)]);
    clocks.total += busiest;
    clocks.conflicts += busiest - 1;
  }
  return clocks;
}

}  // namespace gfxsim
