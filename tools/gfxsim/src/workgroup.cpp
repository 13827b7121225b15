#include "workgroup.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "program.h"

namespace gfxsim {

Workgroup::Workgroup(const Program& program, const Memory& memory, const LaunchOptions& options,
                     const std::string& kernel)
    : program(program), memory(memory), options(options), kernel(kernel) {
  const std::size_t count = program.ops.size();
  counts = {std::vector<std::uint64_t>(count), std::vector<std::uint64_t>(count), std::vector<std::uint64_t>(count),
            std::vector<std::uint64_t>(count), std::vector<std::uint64_t>(count), std::vector<std::uint8_t>(count)};
}

void Workgroup::run_wave(Wave& wave, std::uint64_t quantum) {
  const bool waits = options.checks & kCheckWaits;
  const std::vector<Op>& ops = program.ops;
  for (; quantum > 0 && wave.state == WaveState::running; --quantum) {
    if (wave.next >= ops.size()) throw Error("kernel " + kernel + " runs past the end of its code");
    const Op& op = ops[wave.next];
    if (!op.run)
      throw Error("kernel " + kernel + ", target " + wave.target->name + ": '" + op.text + "' at " +
                  std::to_string(op.pc) + " is not simulated: " + op.unsupported);
    if (waits && std::memcmp(wave.issued, wave.done, sizeof wave.done) != 0) check_waits(wave, op);
    ++counts.executed[wave.next];
    ++wave.next;
    if (op.pc != options.nop_at) op.run(wave, op);
    if (++wave.executed > options.max_wave_instructions) {
      report(wave, op, "run-away", -1,
             "more than " + std::to_string(options.max_wave_instructions) + " instructions in one wave");
      throw StopWorkgroup{};
    }
  }
}

Wave* Workgroup::choose(std::size_t& turn) {
  std::vector<Wave*> running;
  for (const auto& wave : waves)
    if (wave->state == WaveState::running) running.push_back(wave.get());
  if (running.empty()) return nullptr;
  switch (options.schedule) {
    case Schedule::in_order: return running.front();
    case Schedule::round_robin:
      while (waves[turn % waves.size()]->state != WaveState::running) ++turn;
      return waves[turn++ % waves.size()].get();
    case Schedule::random: break;
  }
  return running[random() % running.size()];
}

// Lets waves pass whose barrier every living wave has signalled. False when none can.
bool Workgroup::release_barrier() {
  std::uint32_t complete = std::numeric_limits<std::uint32_t>::max();
  Wave* ended = nullptr;
  for (const auto& wave : waves) {
    if (wave->state == WaveState::ended) {
      ended = wave.get();
    } else {
      complete = std::min(complete, wave->signals);
    }
  }
  bool released = false;
  for (const auto& wave : waves) {
    if (wave->state != WaveState::at_barrier || wave->signals > complete) continue;
    if (ended && (options.checks & kCheckBarriers) && ended->signals < wave->signals)
      report(*wave, *wave->barrier, "barrier", -1,
             "wave " + std::to_string(ended->id) + " ended without reaching this barrier");
    ++wave->passed;
    wave->state = WaveState::running;
    released = true;
  }
  return released;
}

void Workgroup::run() {
  std::size_t turn = 0;
  try {
    for (;;) {
      Wave* wave = choose(turn);
      if (wave) {
        const std::uint64_t quantum = options.schedule == Schedule::in_order ? std::numeric_limits<std::uint64_t>::max()
                                      : options.schedule == Schedule::round_robin ? 1
                                                                                  : 1 + random() % 32;
        run_wave(*wave, quantum);
        if (wave->state != WaveState::running) release_barrier();
        continue;
      }
      if (release_barrier()) continue;
      for (const auto& stuck : waves)
        if (stuck->state == WaveState::at_barrier) {
          report(*stuck, *stuck->barrier, "deadlock", -1, "no wave of the workgroup can go on");
          return;
        }
      return;
    }
  } catch (const StopWorkgroup&) {
  }
}

}  // namespace gfxsim
