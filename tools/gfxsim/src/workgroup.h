// One workgroup in execution: its waves, LDS, findings and counts. Everything here belongs to one host thread.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gfxsim/gfxsim.h"
#include "lds.h"
#include "memory.h"
#include "wave.h"

namespace gfxsim {

struct Program;

// Ends a workgroup early: enough has been reported, or it cannot go on.
struct StopWorkgroup {};

struct Counts {
  std::vector<std::uint64_t> executed;                   // by operation
  std::vector<std::uint64_t> lds_clocks, lds_conflicts;  // by operation
  std::vector<std::uint64_t> global_bytes, global_lines;
  std::vector<std::uint8_t> waited_for;  // by operation: a bit for each Stream that a wait waited for
};

struct Workgroup {
  Workgroup(const Program& program, const Memory& memory, const LaunchOptions& options, const std::string& kernel);

  // Runs to the end, or until findings stop it.
  void run();

  const Program& program;
  const Memory& memory;
  const LaunchOptions& options;
  const std::string& kernel;
  Dim3 id;
  std::vector<std::unique_ptr<Wave>> waves;
  Lds lds;
  std::vector<std::uint8_t> scratch, scratch_defined;
  std::uint32_t scratch_bytes = 0;  // per lane
  std::vector<Report> reports;
  Counts counts;
  std::mt19937_64 random;

 private:
  void run_wave(Wave& wave, std::uint64_t quantum);
  Wave* choose(std::size_t& turn);
  bool release_barrier();
};

// Reads and writes of one operation, against waits that are missing. Called before the operation executes.
void check_waits(Wave& wave, const Op& op);

}  // namespace gfxsim
