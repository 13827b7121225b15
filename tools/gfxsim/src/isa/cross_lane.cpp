// Instructions that move data between lanes, other than DPP. Moves of undefined lanes are not errors; their use is.
#include <string>

#include "opcode_table.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

int first_lane(const Wave& wave) { return wave.exec() ? std::countr_zero(wave.exec()) : 0; }

void write_from_lane(Wave& wave, const Op& op, int lane) {
  const auto value = load<u32>(wave, op, 1);
  const Halves known = load_defined(wave, op, 1);
  const u64 bits = (known.lo >> lane & 1 ? 0xffffu : 0u) | (known.hi >> lane & 1 ? 0xffff0000u : 0u);
  write_scalar(wave, op, op.operand[0], value[lane], bits);
}

void run_readfirstlane(Wave& wave, const Op& op) { write_from_lane(wave, op, first_lane(wave)); }

int lane_operand(Wave& wave, const Op& op, int index) {
  if (!scalar_defined(wave, op.operand[index]) && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", -1, "the lane number was never written");
  return int(read_scalar(wave, op.operand[index])) & (wave.lanes - 1);
}

void run_readlane(Wave& wave, const Op& op) { write_from_lane(wave, op, lane_operand(wave, op, 2)); }

void run_writelane(Wave& wave, const Op& op) {
  const int lane = lane_operand(wave, op, 2);
  Lanes<u32> value;
  value[lane] = u32(read_scalar(wave, op.operand[1]));
  const u64 known = scalar_defined(wave, op.operand[1]) ? ~u64(0) : 0;
  store_bits(wave, op.operand[0].reg, value.lane, u64(1) << lane);
  store_defined(wave, op.operand[0].reg, {known, known}, u64(1) << lane);
}

// Bits of the mask below this lane, counted into the second source.
template <bool kHigh>
void run_mbcnt(Wave& wave, const Op& op) {
  const auto mask = load<u32>(wave, op, 1), base = load<u32>(wave, op, 2);
  Lanes<u32> out;
  for (int i = 0; i < kMaxLanes; ++i) {
    const u64 below = (u64(1) << i) - 1;
    out[i] = base[i] + u32(std::popcount(mask[i] & u32(kHigh ? below >> 32 : below)));
  }
  const u64 defined = value_defined<u32>(wave, op, 1) & value_defined<u32>(wave, op, 2);
  store(wave, op, 0, out, {defined, defined});
}

// Each lane takes the value of the lane given by a nibble of two scalar selectors, in its row of 16 or in the other
// row.
template <bool kOtherRow>
void run_permlane16(Wave& wave, const Op& op) {
  const auto value = load<u32>(wave, op, 1);
  const Halves known = load_defined(wave, op, 1);
  const u64 select = u64(u32(read_scalar(wave, op.operand[2]))) | read_scalar(wave, op.operand[3]) << 32;
  if (!(scalar_defined(wave, op.operand[2]) && scalar_defined(wave, op.operand[3])) && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", -1, "the lane selectors were never written");
  const bool fetch_inactive = op.op_sel & 1, bound_control = op.op_sel & 2;
  const u64 exec = wave.exec();
  u64 lanes = exec;
  Lanes<u32> out;
  Halves defined;
  for (int i = 0; i < wave.lanes; ++i) {
    const int from = (kOtherRow ? (i & ~15) ^ 16 : i & ~15) + int(select >> (4 * (i & 15)) & 15);
    const bool live = fetch_inactive || (exec >> from & 1);
    out[i] = live ? value[from] : 0;
    if (!live && !bound_control) lanes &= ~(u64(1) << i);
    defined.lo |= (live ? known.lo >> from & 1 : 1) << i;
    defined.hi |= (live ? known.hi >> from & 1 : 1) << i;
  }
  store_bits(wave, op.operand[0].reg, out.lane, lanes);
  store_defined(wave, op.operand[0].reg, defined, lanes);
}

}  // namespace

void add_cross_lane(OpcodeTable& t) {
  const auto add = [&](Names names, Handler run, int operands, u32 traits = 0) {
    t.add(names, {"", run, Class::cross_lane, 1, Literal::b32, traits, 0, std::uint8_t(operands)});
  };
  add({"v_readfirstlane_b32"}, run_readfirstlane, 2);
  add({"v_readlane_b32"}, run_readlane, 3);
  add({"v_writelane_b32"}, run_writelane, 3, kReadsResult);
  add({"v_mbcnt_lo_u32_b32"}, run_mbcnt<false>, 3);
  add({"v_mbcnt_hi_u32_b32"}, run_mbcnt<true>, 3);
  add({"v_permlane16_b32"}, run_permlane16<false>, 4, kReadsResult | kAcceptsOpSel);
  add({"v_permlanex16_b32"}, run_permlane16<true>, 4, kReadsResult | kAcceptsOpSel);
}

}  // namespace gfxsim
