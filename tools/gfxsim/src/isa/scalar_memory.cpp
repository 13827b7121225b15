// Scalar loads. They complete in no order, so that only a wait for all of them makes their results usable.
#include <string>

#include "opcode_table.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

// result, 64-bit base, offset (constant or SGPR, which gfx12 follows with offset:).
template <int kDwords>
void run_load(Wave& wave, const Op& op) {
  const bool known = scalar_defined(wave, op.operand[1]) && scalar_defined(wave, op.operand[2]);
  if (!known && checking(wave, kCheckUndefined)) report(wave, op, "undefined", -1, "the address was never written");
  const std::uint64_t address =
      (read_scalar(wave, op.operand[1]) + read_scalar(wave, op.operand[2]) + std::uint64_t(std::int64_t(op.offset0))) &
      ~3ull;
  const std::uint32_t number = issue(wave, kScalarLoads);
  const Operand& result = op.operand[0];
  if (!wave.group->memory.find(address, kDwords * 4)) {
    report(wave, op, "out-of-bounds", -1, "reads " + wave.group->memory.describe(address, kDwords * 4));
    return;
  }
  std::memcpy(&wave.s[result.reg], reinterpret_cast<const void*>(address), kDwords * 4);
  std::fill_n(&wave.s_defined[result.reg], kDwords, ~0u);
  mark_pending(wave, result, kScalarLoads, number, kDwords);
}

}  // namespace

void add_scalar_memory(OpcodeTable& t) {
  const auto load = [&](Names names, Handler run) { t.add(names, {"", run, Class::smem, 1, Literal::b64, 0, 0, 3}); };
  load({"s_load_dword", "s_load_b32"}, run_load<1>);
  load({"s_load_dwordx2", "s_load_b64"}, run_load<2>);
  load({"s_load_dwordx3", "s_load_b96"}, run_load<3>);
  load({"s_load_dwordx4", "s_load_b128"}, run_load<4>);
  load({"s_load_dwordx8", "s_load_b256"}, run_load<8>);
  load({"s_load_dwordx16", "s_load_b512"}, run_load<16>);
}

}  // namespace gfxsim
