// Models of branches, waits and barriers: which operation is next, which memory operations count as done.
#include <functional>

#include "bench.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u32 kHere = 40;  // the operation after the branch

void add(Checks& checks, const std::string& instruction, const std::string& target,
         const std::function<std::string(Bench&, const std::string&)>& run) {
  add_check(checks, instruction, target, run);
}

// Whether the branch is taken under `prepare`.
struct Branch {
  const char* instruction;
  void (*prepare)(Bench& bench);
  bool taken;
};

std::string check_branch(Bench& bench, const Branch& branch) {
  bench.randomise_registers();
  branch.prepare(bench);
  Op op = parse_instruction(bench.target(), branch.instruction, 0x100, 4);
  if (!op.run) return op.unsupported;
  if (op.offset0 != -3) return "the displacement is read as " + std::to_string(op.offset0);
  op.target = 7;
  bench.wave().next = kHere;
  op.run(bench.wave(), op);
  if (!bench.group().reports.empty()) return bench.group().reports[0].to_string();
  const u32 wanted = branch.taken ? 7 : kHere;
  return bench.wave().next == wanted ? "" : "goes to " + std::to_string(bench.wave().next);
}

const Branch kBranches[] = {
    {"s_branch 65533", [](Bench&) {}, true},
    {"s_cbranch_scc0 65533", [](Bench& b) { b.wave().scc = false; }, true},
    {"s_cbranch_scc0 65533", [](Bench& b) { b.wave().scc = true; }, false},
    {"s_cbranch_scc1 65533", [](Bench& b) { b.wave().scc = true; }, true},
    {"s_cbranch_scc1 65533", [](Bench& b) { b.wave().scc = false; }, false},
    {"s_cbranch_vccz 65533", [](Bench& b) { b.set_scalar64(kVcc, 0); }, true},
    {"s_cbranch_vccz 65533", [](Bench& b) { b.set_scalar64(kVcc, 1 << 20); }, false},
    {"s_cbranch_vccnz 65533", [](Bench& b) { b.set_scalar64(kVcc, 1); }, true},
    {"s_cbranch_vccnz 65533", [](Bench& b) { b.set_scalar64(kVcc, 0); }, false},
    {"s_cbranch_execz 65533", [](Bench& b) { b.set_scalar64(kExec, 0); }, true},
    {"s_cbranch_execz 65533", [](Bench& b) { b.set_scalar64(kExec, 1u << 31); }, false},
    {"s_cbranch_execnz 65533", [](Bench& b) { b.set_scalar64(kExec, 1); }, true},
    {"s_cbranch_execnz 65533", [](Bench& b) { b.set_scalar64(kExec, 0); }, false},
};

// 10 operations were issued in every stream; how many of each are done afterwards.
struct Wait {
  const char *instruction, *target;
  u32 loads, stores, lds, scalar;
};

std::string check_wait(Bench& bench, const Wait& wait) {
  Wave& wave = bench.wave();
  for (int stream = 0; stream < kStreams; ++stream) wave.issued[stream] = 50, wave.done[stream] = 1;
  if (const std::string problem = bench.execute(wait.instruction); !problem.empty()) return problem;
  const u32 wanted[kStreams] = {wait.loads, wait.stores, wait.lds, wait.scalar};
  for (int stream = 0; stream < kStreams; ++stream)
    if (wave.done[stream] != wanted[stream])
      return "stream " + std::to_string(stream) + ": " + std::to_string(wave.done[stream]) + " of 50 done, not " +
             std::to_string(wanted[stream]);
  // A later, weaker wait takes nothing back.
  if (const std::string problem = bench.execute(wait.instruction); !problem.empty()) return problem;
  return wave.done[kLoads] == wait.loads ? "" : "a second wait changes what is done";
}

const Wait kWaits[] = {
    {"s_waitcnt vmcnt(0)", "gfx942", 50, 1, 1, 1},
    {"s_waitcnt vmcnt(3)", "gfx942", 47, 1, 1, 1},
    {"s_waitcnt lgkmcnt(0)", "gfx942", 1, 1, 50, 50},
    {"s_waitcnt lgkmcnt(2)", "gfx942", 1, 1, 48, 1},
    {"s_waitcnt vmcnt(1) expcnt(0) lgkmcnt(4)", "gfx942", 49, 1, 46, 1},
    {"s_waitcnt_vscnt null, 0x0", "gfx1030", 1, 50, 1, 1},
    {"s_waitcnt_vscnt null, 0x3", "gfx1030", 1, 47, 1, 1},
    {"s_waitcnt_depctr 0xffe3", "gfx1030", 1, 1, 1, 1},
    {"s_waitcnt vmcnt(1) expcnt(0) lgkmcnt(4)", "gfx1100", 49, 1, 46, 1},
    {"s_waitcnt vmcnt(0)", "gfx1100", 50, 1, 1, 1},
    {"s_waitcnt_vscnt null, 0x0", "gfx1100", 1, 50, 1, 1},
    {"s_waitcnt_vscnt null, 0x2b", "gfx1100", 1, 7, 1, 1},
    {"s_wait_loadcnt 0x0", "gfx1201", 50, 1, 1, 1},
    {"s_wait_loadcnt 0x4", "gfx1201", 46, 1, 1, 1},
    {"s_wait_storecnt 0x2", "gfx1201", 1, 48, 1, 1},
    {"s_wait_dscnt 0x5", "gfx1201", 1, 1, 45, 1},
    {"s_wait_kmcnt 0x0", "gfx1201", 1, 1, 1, 50},
    {"s_wait_kmcnt 0x1", "gfx1201", 1, 1, 1, 1},
    {"s_wait_loadcnt_dscnt 0x301", "gfx1201", 47, 1, 49, 1},
    {"s_wait_storecnt_dscnt 0x203", "gfx1201", 1, 48, 47, 1},
    {"s_wait_samplecnt 0x0", "gfx1201", 1, 1, 1, 1},
    {"s_wait_bvhcnt 0x0", "gfx1201", 1, 1, 1, 1},
    {"s_wait_expcnt 0x0", "gfx1201", 1, 1, 1, 1},
    {"s_wait_xcnt 0x0", "gfx1201", 1, 1, 1, 1},
    {"s_waitcnt vmcnt(43) lgkmcnt(13)", "gfx942", 7, 1, 37, 1},
    {"s_wait_loadcnt 0x2d", "gfx1201", 5, 1, 1, 1},
    {"s_wait_loadcnt_dscnt 0x282a", "gfx1201", 10, 1, 8, 1},
    {"s_wait_storecnt_dscnt 0x2729", "gfx1201", 1, 11, 9, 1},
};

// Nothing but the count of outstanding operations may change.
std::string check_nothing(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  const auto before = std::make_unique<Wave>(wave);
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  const bool same = std::memcmp(before->v, wave.v, sizeof wave.v) == 0 &&
                    std::memcmp(before->s, wave.s, sizeof wave.s) == 0 && before->scc == wave.scc &&
                    before->state == wave.state && before->next == wave.next &&
                    std::memcmp(before->done, wave.done, sizeof wave.done) == 0;
  return same ? "" : "the wave changed";
}

std::string check_barrier(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  wave.done[kLds] = 5;
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  if (wave.state != WaveState::at_barrier || wave.signals != 1 || wave.complete_at[1][0] != 5)
    return "the wave is not at the barrier";
  wave.state = WaveState::running;
  wave.passed = 1;
  bench.set_scalar64(kExec, wave.all_lanes() ^ 2);
  const std::string found = bench.execute(instruction);
  return found.find("barrier") != std::string::npos && found.find("lane 1") != std::string::npos
             ? ""
             : "partial EXEC: " + found;
}

std::string check_signal(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  if (wave.state != WaveState::running || wave.signals != 1) return "a signal must not wait";
  const std::string found = bench.execute(instruction);
  return found.find("signals again") != std::string::npos ? "" : "a second signal: " + found;
}

std::string check_wait_for_barrier(Bench& bench, const std::string& instruction) {
  bench.wave().signals = 1;
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  return bench.wave().state == WaveState::at_barrier ? "" : "the wave does not wait";
}

std::string check_end(Bench& bench, const std::string& instruction) {
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  return bench.wave().state == WaveState::ended ? "" : "the wave goes on";
}

std::string check_getpc(Bench& bench, const std::string& instruction) {
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  const u64 wanted = bench.group().program.address_of(0x1004);
  return bench.wave().read64(8) == wanted ? "" : hexadecimal(bench.wave().read64(8));
}

// A program of two instructions at 0x1000 and 0x1004 to jump in.
std::string check_jump(Bench& bench, const std::string& instruction) {
  Program& program = const_cast<Program&>(bench.group().program);
  program.ops.resize(2);
  program.ops[0].pc = 0x1000;
  program.ops[1].pc = 0x1004;
  bench.set_scalar64(2, program.address_of(0x1004));
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  if (bench.wave().next != 1) return "goes to " + std::to_string(bench.wave().next);
  const bool links = instruction.find("swap") != std::string::npos;
  return !links || bench.wave().read64(8) == program.address_of(0x1004)
             ? ""
             : "returns to " + hexadecimal(bench.wave().read64(8));
}

std::string check_counted(Bench& bench, const std::string& instruction, Stream stream) {
  const u32 before = bench.wave().issued[stream];
  if (const std::string problem = check_nothing(bench, instruction); !problem.empty()) return problem;
  return bench.wave().issued[stream] == before + 1 ? "" : "it is not counted as outstanding";
}

}  // namespace

void add_control_checks(Checks& checks) {
  for (const Branch& branch : kBranches)
    add(checks, branch.instruction, "",
        [&branch](Bench& bench, const std::string&) { return check_branch(bench, branch); });
  for (const Wait& wait : kWaits)
    add(checks, wait.instruction, wait.target,
        [&wait](Bench& bench, const std::string&) { return check_wait(bench, wait); });
  for (const char* instruction :
       {"s_nop 0", "s_sleep 1", "s_setprio 3", "s_clause 0x1", "s_delay_alu instid0(VALU_DEP_1)",
        "s_wait_alu depctr_va_vcc(0)", "s_waitcnt_depctr depctr_va_vdst(0)", "s_wait_idle",
        "s_sendmsg sendmsg(MSG_DEALLOC_VGPRS)", "s_icache_inv", "s_set_inst_prefetch_distance 0x3",
        "s_inst_prefetch 0x2", "s_code_end", "v_nop"})
    add(checks, instruction, "", check_nothing);
  add(checks, "s_endpgm", "", check_end);
  add(checks, "s_barrier", "gfx942", check_barrier);
  add(checks, "s_barrier_signal -1", "gfx1201", check_signal);
  add(checks, "s_barrier_wait 0xffff", "gfx1201", check_wait_for_barrier);
  add(checks, "s_getpc_b64 s[8:9]", "", check_getpc);
  add(checks, "s_setpc_b64 s[2:3]", "", check_jump);
  add(checks, "s_swappc_b64 s[8:9], s[2:3]", "", check_jump);
  const auto counted = [&](const char* instruction, const char* target, Stream stream) {
    add(checks, instruction, target,
        [stream](Bench& bench, const std::string& text) { return check_counted(bench, text, stream); });
  };
  counted("buffer_inv sc1", "gfx942", kLoads);
  counted("buffer_wbl2 sc1", "gfx942", kLoads);
  counted("buffer_gl0_inv", "gfx1100", kLoads);
  counted("buffer_gl1_inv", "gfx1100", kLoads);
  counted("global_inv scope:SCOPE_SE", "gfx1201", kLoads);
  counted("global_wb scope:SCOPE_SE", "gfx1201", kStores);
  counted("global_wbinv scope:SCOPE_SE", "gfx1201", kStores);
}

}  // namespace gfxsim
