#include "wave.h"

#include <algorithm>

#include "lanes.h"
#include "workgroup.h"

namespace gfxsim {

bool checking(const Wave& wave, unsigned check) { return wave.group->options.checks & check; }

void report(Wave& wave, const Op& op, const char* kind, int lane, const std::string& message) {
  Workgroup& group = *wave.group;
  for (Report& earlier : group.reports)
    if (earlier.kind == kind && earlier.pc == op.pc) {
      ++earlier.count;
      return;
    }
  group.reports.push_back({kind, group.kernel, wave.target->name, group.id, wave.id, lane, op.pc, op.text, message, 1});
  if (group.reports.size() >= group.options.max_reports) throw StopWorkgroup{};
}

std::uint32_t issue(Wave& wave, Stream stream) {
  if (++wave.issued[stream] >= 1u << kTicketBits)
    throw Error("more than 2^28 memory operations in one wave are not modelled");
  return wave.issued[stream];
}

void mark_pending(Wave& wave, const Operand& result, Stream stream, std::uint32_t number, int dwords) {
  std::uint32_t* tickets = result.kind == Kind::vector ? wave.v_ticket : wave.s_ticket;
  std::fill_n(tickets + result.reg, dwords, make_ticket(stream, number));
  if (result.kind == Kind::vector) std::fill_n(wave.v_flat + result.reg, dwords, 0);
  if (stream == kLoads) wave.last_load = number;
}

void wait_for(Wave& wave, Stream stream, std::uint32_t outstanding) {
  if (outstanding && stream == kScalarLoads) return;
  // Where flat accesses return out of order, a count above 0 says nothing while one is on its way: LLVM's
  // SIInsertWaitcnts waits for 0 then.
  if (outstanding && !wave.target->flat_in_order() && wave.last_flat[stream] > wave.done[stream]) return;
  if (wave.issued[stream] > outstanding)
    wave.done[stream] = std::max(wave.done[stream], wave.issued[stream] - outstanding);
}

std::uint64_t read_scalar(const Wave& wave, const Operand& operand) {
  switch (operand.kind) {
    case Kind::constant: return operand.bits;
    case Kind::scalar: return operand.dwords == 2 ? wave.read64(operand.reg) : wave.s[operand.reg];
    case Kind::scc: return wave.scc;
    default: return 0;
  }
}

bool scalar_defined(const Wave& wave, const Operand& operand) {
  if (operand.kind == Kind::scc) return wave.scc_defined;
  if (operand.kind != Kind::scalar) return true;
  if (operand.dwords == 2) return wave.defined64(operand.reg) == ~std::uint64_t(0);
  return wave.s_defined[operand.reg] == ~0u;
}

void write_scalar(Wave& wave, const Op& op, const Operand& operand, std::uint64_t value, std::uint64_t defined) {
  if (operand.reg == kNull) return;
  wave.s[operand.reg] = std::uint32_t(value);
  wave.s_defined[operand.reg] = std::uint32_t(defined);
  if (operand.dwords == 2) {
    wave.s[operand.reg + 1] = std::uint32_t(value >> 32);
    wave.s_defined[operand.reg + 1] = std::uint32_t(defined >> 32);
  }
  if (operand.reg != kExec && operand.reg != kExec + 1) return;
  const std::uint64_t missing = ~wave.defined64(kExec) & wave.all_lanes();
  if (missing && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", std::countr_zero(missing), "EXEC becomes a value that was never written");
  wave.s_defined[kExec] = wave.s_defined[kExec + 1] = ~0u;
}

void write_mask(Wave& wave, const Op& op, const Operand& operand, std::uint64_t mask, std::uint64_t defined) {
  Operand result = operand;
  result.dwords = wave.lanes == 64 ? 2 : 1;
  write_scalar(wave, op, result, mask & wave.all_lanes(), defined | ~wave.all_lanes());
}

void check_waits(Wave& wave, const Op& op) {
  for (const RegisterRange& range : op.ranges) {
    std::uint32_t* tickets = range.kind == Kind::vector ? wave.v_ticket : wave.s_ticket;
    for (int reg = range.first; reg < range.first + range.count; ++reg) {
      const Stream stream = ticket_stream(tickets[reg]);
      const bool flat_done = range.kind != Kind::vector || wave.v_flat[reg] <= wave.done[kLds];
      if (flat_done && ticket_number(tickets[reg]) <= wave.done[stream]) continue;
      // Loads of one stream return in order, so a later one may overwrite an earlier one.
      if (flat_done && range.written && stream == op.load_stream) continue;
      const bool agpr = range.kind == Kind::vector && reg >= kAgpr0;
      const std::string name = range.kind == Kind::scalar
                                   ? "scalar register " + std::to_string(reg)
                                   : (agpr ? "a" : "v") + std::to_string(agpr ? reg - kAgpr0 : reg);
      report(wave, op, "missing-wait", -1,
             (range.written ? "overwrites " : "uses ") + name + " before the wait for the load into it");
      tickets[reg] = 0;
      if (range.kind == Kind::vector) wave.v_flat[reg] = 0;
    }
  }
}

}  // namespace gfxsim
