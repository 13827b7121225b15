// Branches, the end of a wave, barriers, and instructions that change nothing a simulation sees.
#include "opcode_table.h"
#include "program.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

void run_nothing(Wave&, const Op&) {}

void run_endpgm(Wave& wave, const Op&) { wave.state = WaveState::ended; }

void branch_if(Wave& wave, const Op& op, bool condition, bool defined) {
  if (!defined && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", -1, "the branch condition was never written");
  if (condition) wave.next = std::uint32_t(op.target);
}

void run_branch(Wave& wave, const Op& op) { wave.next = std::uint32_t(op.target); }

template <bool kWanted>
void run_branch_scc(Wave& wave, const Op& op) {
  branch_if(wave, op, wave.scc == kWanted, wave.scc_defined);
}
template <bool kZero>
void run_branch_vcc(Wave& wave, const Op& op) {
  const std::uint64_t value = wave.read_mask(kVcc), known = wave.defined_mask(kVcc) | ~wave.all_lanes();
  branch_if(wave, op, (value == 0) == kZero, ~known == 0 || (value & known) != 0);
}
template <bool kZero>
void run_branch_exec(Wave& wave, const Op& op) {
  branch_if(wave, op, (wave.exec() == 0) == kZero, true);
}

// EXEC may be narrower than the launched lanes only if the program diverged: some work-items do not reach the barrier.
void arrive(Wave& wave, const Op& op) {
  if (wave.exec() != wave.launched && checking(wave, kCheckBarriers)) {
    const std::uint64_t missing = wave.launched & ~wave.exec();
    report(wave, op, "barrier", std::countr_zero(missing), "a barrier under partial EXEC: this lane does not reach it");
  }
  std::uint32_t (&complete)[2] = wave.complete_at[++wave.signals & 3];
  complete[0] = wave.done[kLds];
  complete[1] = wave.done[kLoads];
  wave.barrier = &op;
}

void run_barrier(Wave& wave, const Op& op) {
  arrive(wave, op);
  wave.state = WaveState::at_barrier;
}
void run_barrier_signal(Wave& wave, const Op& op) {
  if (wave.signals != wave.passed) report(wave, op, "barrier", -1, "signals again before it has waited");
  arrive(wave, op);
}
void run_barrier_wait(Wave& wave, const Op& op) {
  wave.barrier = &op;
  wave.state = WaveState::at_barrier;
  if (wave.signals != wave.passed) return;
  report(wave, op, "deadlock", -1, "waits for a barrier that it has not signalled");
  throw StopWorkgroup{};
}

void run_getpc(Wave& wave, const Op& op) {
  const std::uint64_t next = wave.group->program.address_of(op.pc + op.bytes);
  write_scalar(wave, op, op.operand[0], next, ~std::uint64_t(0));
}

void jump(Wave& wave, const Op& op, int operand) {
  if (!scalar_defined(wave, op.operand[operand]))
    report(wave, op, "undefined", -1, "the jump target was never written");
  const std::int32_t index = wave.group->program.index_at(read_scalar(wave, op.operand[operand]));
  if (index < 0) {
    report(wave, op, "out-of-bounds", -1, "jumps to an address that holds no instruction of this code object");
    throw StopWorkgroup{};
  }
  wave.next = std::uint32_t(index);
}
void run_setpc(Wave& wave, const Op& op) { jump(wave, op, 0); }
void run_swappc(Wave& wave, const Op& op) {
  const std::uint64_t back = wave.group->program.address_of(op.pc + op.bytes);
  jump(wave, op, 1);
  write_scalar(wave, op, op.operand[0], back, ~std::uint64_t(0));
}

}  // namespace

void add_control(OpcodeTable& t) {
  const auto add = [&](const char* name, Handler run, Class kind, std::uint32_t traits = 0) {
    t.add({name}, {"", run, kind, 0, Literal::b32, traits});
  };
  // Scheduling hints and hazard waits: the simulator has no pipeline, so none of them is ever needed.
  for (const char* name :
       {"s_nop", "s_sleep", "s_setprio", "s_clause", "s_delay_alu", "s_wait_alu", "s_wait_idle", "s_sendmsg",
        "s_icache_inv", "s_set_inst_prefetch_distance", "s_inst_prefetch", "s_code_end", "v_nop"})
    add(name, run_nothing, Class::wait, kNoOperands);
  add("s_endpgm", run_endpgm, Class::branch);
  add("s_branch", run_branch, Class::branch);
  add("s_cbranch_scc0", run_branch_scc<false>, Class::branch, kReadsScc);
  add("s_cbranch_scc1", run_branch_scc<true>, Class::branch, kReadsScc);
  add("s_cbranch_vccz", run_branch_vcc<true>, Class::branch, kReadsVcc);
  add("s_cbranch_vccnz", run_branch_vcc<false>, Class::branch, kReadsVcc);
  add("s_cbranch_execz", run_branch_exec<true>, Class::branch);
  add("s_cbranch_execnz", run_branch_exec<false>, Class::branch);
  add("s_barrier", run_barrier, Class::barrier);
  add("s_barrier_signal", run_barrier_signal, Class::barrier);
  add("s_barrier_wait", run_barrier_wait, Class::barrier);
  t.add({"s_getpc_b64"}, {"", run_getpc, Class::branch, 1, Literal::b64, 0, 0, 1});
  t.add({"s_setpc_b64"}, {"", run_setpc, Class::branch, 0, Literal::b64, 0, 0, 1});
  t.add({"s_swappc_b64"}, {"", run_swappc, Class::branch, 1, Literal::b64, 0, 0, 2});
}

}  // namespace gfxsim
