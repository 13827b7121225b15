// Every barrier and every wait of a kernel, left out one at a time, is found out. And which waits flat loads need.
#include "checks/bench.h"
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

// What is found in instructions of one wave: "" or the text of the first that is wrong.
std::string first_finding(const std::string& target, const std::vector<std::string>& instructions) {
  Bench bench(target, 1);
  Wave& wave = bench.wave();
  const std::uint64_t address = bench.buffer_address();
  bench.set_scalar64(0, address);
  std::fill_n(wave.v[0], kMaxLanes, std::uint32_t(address));
  std::fill_n(wave.v[1], kMaxLanes, std::uint32_t(address >> 32));
  std::fill_n(wave.v[4], kMaxLanes, 0);
  std::fill_n(wave.v[6], kMaxLanes, 0);
  std::fill_n(wave.v[7], kMaxLanes, std::uint32_t(kPrivateAperture >> 32));
  for (const std::string& instruction : instructions) {
    const Op op = parse_instruction(bench.target(), instruction, 0x1000, 4);
    if (!op.run) return op.unsupported;
    check_waits(wave, op);
    op.run(wave, op);
    if (!bench.group().reports.empty()) return bench.group().reports[0].kind + ": " + instruction;
  }
  return "";
}

struct FlatCase {
  const char* target;
  std::vector<std::string> instructions;
  bool is_right;
};

const std::string kFlat3 = "flat_load_dword v3, v[0:1]", kFlat2 = "flat_load_dword v2, v[0:1]",
                  kPrivate2 = "flat_load_dword v2, v[6:7]", kGlobal2 = "global_load_dword v2, v[0:1], off",
                  kGlobal5 = "global_load_dword v5, v[0:1], off", kLds2 = "ds_read_b32 v2, v4",
                  kUse3 = "v_mov_b32_e32 v8, v3", kUse2 = "v_mov_b32_e32 v8, v2";

const FlatCase kFlatCases[] = {
    // In order from gfx10 on: this is what clang emits.
    {"gfx1030", {kFlat3, kFlat2, "s_waitcnt vmcnt(1) lgkmcnt(1)", kUse3}, true},
    {"gfx1100", {kFlat3, kFlat2, "s_waitcnt vmcnt(1) lgkmcnt(1)", kUse3}, true},
    {"gfx1201", {kFlat3, kFlat2, "s_wait_loadcnt_dscnt 0x101", kUse3}, true},
    {"gfx1100", {kFlat3, kFlat2, "s_waitcnt vmcnt(1) lgkmcnt(1)", kUse2}, false},
    {"gfx1201", {kFlat3, kFlat2, "s_wait_loadcnt_dscnt 0x101", kUse2}, false},
    // Both counters are needed.
    {"gfx1100", {kFlat3, kFlat2, "s_waitcnt vmcnt(1)", kUse3}, false},
    {"gfx1100", {kFlat3, kFlat2, "s_waitcnt lgkmcnt(1)", kUse3}, false},
    {"gfx942", {kFlat3, "s_waitcnt vmcnt(0)", kUse3}, false},
    {"gfx942", {kFlat3, "s_waitcnt lgkmcnt(0)", kUse3}, false},
    {"gfx942", {kFlat3, "s_waitcnt vmcnt(0) lgkmcnt(0)", kUse3}, true},
    // But for private memory, which compilers know to be no LDS.
    {"gfx942", {kPrivate2, kGlobal5, "s_waitcnt vmcnt(1)", kUse2}, true},
    {"gfx942", {kPrivate2, "s_waitcnt vmcnt(1)", kUse2}, false},
    {"gfx1201", {kPrivate2, "s_wait_loadcnt 0x0", kUse2}, true},
    {"gfx942", {kFlat3, "s_waitcnt vmcnt(0)", "s_waitcnt lgkmcnt(0)", kUse3}, true},
    // A register is overwritten like one of another load.
    {"gfx1100", {kFlat3, "v_mov_b32_e32 v3, 0"}, false},
    {"gfx1100", {kFlat2, "s_waitcnt lgkmcnt(0)", kGlobal2}, true},
    {"gfx1100", {kFlat2, kGlobal2}, false},
    // Out of order before: while one is on its way, only counts of 0 say anything, of other operations too.
    {"gfx942", {kFlat3, kFlat2, "s_waitcnt vmcnt(1) lgkmcnt(1)", kUse3}, false},
    {"gfx942", {kGlobal2, kFlat3, "s_waitcnt vmcnt(1)", kUse2}, false},
    {"gfx942", {kGlobal2, kFlat3, "s_waitcnt vmcnt(0)", kUse2}, true},
    {"gfx942", {kGlobal2, "flat_store_dword v[0:1], v6", "s_waitcnt vmcnt(1)", kUse2}, false},
    {"gfx942", {kLds2, kFlat3, "s_waitcnt lgkmcnt(1)", kUse2}, false},
    {"gfx942", {kLds2, kFlat3, "s_waitcnt lgkmcnt(0)", kUse2}, true},
    {"gfx1100", {kLds2, kFlat3, "s_waitcnt lgkmcnt(1)", kUse2}, true},
    {"gfx942", {kFlat3, "s_waitcnt vmcnt(0) lgkmcnt(0)", kGlobal2, kGlobal5, "s_waitcnt vmcnt(1)", kUse2}, true},
};

TEST(FlatWaits, ByHand) {
  for (const FlatCase& c : kFlatCases) {
    std::string text = c.target;
    for (const std::string& instruction : c.instructions) text += "; " + instruction;
    EXPECT_EQ(first_finding(c.target, c.instructions), c.is_right ? "" : "missing-wait: " + c.instructions.back())
        << text;
  }
}

// In waves of 32 a branch on VCC does not read its upper half, which clang loads other numbers into.
TEST(ScalarWaits, OfBranchesOnVcc) {
  const std::string zero = "s_mov_b64 vcc, 0", branch = "s_cbranch_vccnz 1";
  for (const std::string target : {"gfx942", "gfx1030", "gfx1100", "gfx1201"})
    for (const std::string half : {"vcc_lo", "vcc_hi"}) {
      const std::string load = (target == "gfx942" || target == "gfx1030" ? "s_load_dword " : "s_load_b32 ") + half;
      const bool is_right = target != "gfx942" && half == "vcc_hi";
      const std::string found = first_finding(target, {zero, load + ", s[0:1], 0x0", branch});
      EXPECT_EQ(found, is_right ? "" : "missing-wait: " + branch) << target << ' ' << half;
    }
}

}  // namespace
}  // namespace gfxsim::testing
