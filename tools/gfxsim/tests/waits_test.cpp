// Every barrier and every wait of a kernel, left out one at a time, is found out.
#include "harness.h"

namespace gfxsim::testing {
namespace {

class Waits : public OnTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, Waits, ::testing::Values("gfx942", "gfx1100", "gfx1201"));

// Whether something must be found when this instruction is missing.
bool is_needed(const Instruction& instruction) {
  // Waits for stores order memory between workgroups; no result of this launch depends on them.
  if (instruction.opcode == "s_wait_storecnt" || instruction.opcode == "s_waitcnt_vscnt") return false;
  // Waits for hazards guard a pipeline that is not modelled.
  if (instruction.opcode == "s_wait_alu" || instruction.opcode == "s_waitcnt_depctr") return false;
  return instruction.kind == "barrier" || instruction.opcode.rfind("s_wait", 0) == 0;
}

TEST_P(Waits, OfTransposeAreNeeded) {
  const auto module = load("basic");
  int left_out = 0;
  for (const Instruction& instruction : module->instructions("transpose")) {
    if (!is_needed(instruction)) continue;
    ++left_out;
    std::vector<float> x(64 * 64), y(64 * 64);
    Arguments arguments(device);
    arguments(x)(y)(64)(64);
    LaunchOptions options;
    options.schedule = Schedule::random;
    options.nop_at = instruction.pc;
    const LaunchResult result = device.launch(*module, "transpose", {2, 2}, {256}, 0, arguments.bytes(), options);
    EXPECT_FALSE(result.ok()) << "left out without notice: " << instruction.text << " at " << instruction.pc;
  }
  EXPECT_GE(left_out, 4);
}

}  // namespace
}  // namespace gfxsim::testing
