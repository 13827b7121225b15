// LDS reads, writes and atomics, and the permutations that run through the LDS unit.
#include <string>

#include "bank_conflicts.h"
#include "opcode_table.h"
#include "workgroup.h"

namespace gfxsim {
namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

template <class F>
void for_each_lane(u64 lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

void require_address(Wave& wave, const Op& op, int operand) {
  const u64 missing = wave.exec() & ~value_defined<u32>(wave, op, operand);
  if (missing && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", std::countr_zero(missing), "the LDS address was never written");
}

// Whether [address, address + bytes) may be accessed; reports if not.
bool in_lds(Wave& wave, const Op& op, int lane, u32 address, u32 bytes, u32 alignment) {
  const u32 size = wave.group->lds.bytes();
  if (u64(address) + bytes > size) {
    report(wave, op, "out-of-bounds", lane,
           std::to_string(bytes) + " bytes at LDS address " + std::to_string(address) + " of " + std::to_string(size));
    return false;
  }
  if (address % alignment) {
    report(wave, op, "misaligned", lane,
           "LDS address " + std::to_string(address) + " is not a multiple of " + std::to_string(alignment));
    return false;
  }
  return true;
}

// Notes the access of one lane in the shadow; reports a race.
void note(Wave& wave, const Op& op, int lane, u32 address, u32 bytes, LdsAccess kind, u32 number, bool dma) {
  if (!checking(wave, kCheckRaces)) return;
  Workgroup& group = *wave.group;
  for (u32 word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    const unsigned halves = bytes >= 4 ? 3u : address & 2 ? 2u : 1u;
    const int other = group.lds.access(group.waves, wave, word, halves, kind, number, dma);
    if (other < 0) continue;
    const char* with = other == wave.id ? " races with this wave's own transfer to LDS, which it has not waited for"
                                        : " races with wave ";
    report(wave, op, "lds-race", lane,
           std::string(kind == LdsAccess::read ? "a read" : "a write") + " of LDS address " + std::to_string(word * 4) +
               with + (other == wave.id ? "" : std::to_string(other)));
    return;
  }
}

void count_conflicts(Wave& wave, const Op& op, const Lanes<u32>& address, u32 bytes, bool is_read) {
  if (!wave.group->options.statistics) return;
  const LdsClocks clocks = lds_clocks(*wave.target, address.lane, wave.exec(), wave.lanes, bytes, is_read);
  wave.group->counts.lds_clocks[op.index] += clocks.total;
  wave.group->counts.lds_conflicts[op.index] += clocks.conflicts;
}

// Register `reg` of one lane from or to LDS, `bytes` at most 4.
void copy_in(Wave& wave, int reg, int lane, u32 address, u32 bytes) {
  u32 value = 0;
  std::memcpy(&value, wave.group->lds.data(address), bytes);
  wave.v[reg][lane] = value;
  const unsigned known = wave.group->lds.defined(address / 4);
  const u64 bit = u64(1) << lane;
  const bool low = bytes == 4 ? known & 1 : known >> (address >> 1 & 1) & 1;
  const bool high = bytes == 4 ? known & 2 : low;
  wave.v_defined[reg].lo = (wave.v_defined[reg].lo & ~bit) | (low ? bit : 0);
  wave.v_defined[reg].hi = (wave.v_defined[reg].hi & ~bit) | (high ? bit : 0);
}

void copy_out(Wave& wave, int reg, int lane, u32 address, u32 bytes, u32 shift) {
  const u32 value = wave.v[reg][lane] >> shift;
  std::memcpy(wave.group->lds.data(address), &value, bytes);
  const bool low = wave.v_defined[reg].lo >> lane & 1, high = wave.v_defined[reg].hi >> lane & 1;
  const bool source = shift ? high : low;
  if (bytes == 4) return wave.group->lds.set_defined(address / 4, 3, (low ? 1u : 0u) | (high ? 2u : 0u));
  const unsigned half = address & 2 ? 2 : 1;
  wave.group->lds.set_defined(address / 4, half, source ? half : 0);
}

// kBytes per access, kAccesses with their own offsets (read2, write2) in units of kUnit bytes.
template <u32 kBytes, int kAccesses, u32 kUnit>
void run_read(Wave& wave, const Op& op) {
  require_address(wave, op, 1);
  const auto base = load<u32>(wave, op, 1);
  const u32 number = issue(wave, kLds);
  constexpr u32 words = (kBytes + 3) / 4;
  for (int access = 0; access < kAccesses; ++access) {
    const u32 offset = u32(access ? op.offset1 : op.offset0) * kUnit;
    Lanes<u32> address;
    for (int i = 0; i < kMaxLanes; ++i) address[i] = base[i] + offset;
    const int first = op.operand[0].reg + access * int(words);
    for_each_lane(wave.exec(), [&](int lane) {
      if (!in_lds(wave, op, lane, address[lane], kBytes, std::min(kBytes, 4u))) return;
      note(wave, op, lane, address[lane], kBytes, LdsAccess::read, number, false);
      for (u32 word = 0; word < words; ++word)
        copy_in(wave, first + int(word), lane, address[lane] + 4 * word, std::min(kBytes, 4u));
    });
    count_conflicts(wave, op, address, kBytes, true);
  }
  mark_pending(wave, op.operand[0], kLds, number, kAccesses * int(words));
}

template <u32 kBytes, int kAccesses, u32 kUnit, u32 kShift = 0>
void run_write(Wave& wave, const Op& op) {
  require_address(wave, op, 0);
  const auto base = load<u32>(wave, op, 0);
  const u32 number = issue(wave, kLds);
  constexpr u32 words = (kBytes + 3) / 4;
  for (int access = 0; access < kAccesses; ++access) {
    const u32 offset = u32(access ? op.offset1 : op.offset0) * kUnit;
    Lanes<u32> address;
    for (int i = 0; i < kMaxLanes; ++i) address[i] = base[i] + offset;
    const int first = op.operand[1 + access].reg;
    for_each_lane(wave.exec(), [&](int lane) {
      if (!in_lds(wave, op, lane, address[lane], kBytes, std::min(kBytes, 4u))) return;
      note(wave, op, lane, address[lane], kBytes, LdsAccess::write, number, false);
      for (u32 word = 0; word < words; ++word)
        copy_out(wave, first + int(word), lane, address[lane] + 4 * word, std::min(kBytes, 4u), kShift);
    });
    count_conflicts(wave, op, address, kBytes, false);
  }
}

// Reads a 16-bit value into one half of the result, sign-extended or not, keeping the other half or clearing it.
enum class Into { low_clear, low_keep, high_keep };
template <u32 kBytes, bool kSigned, Into kInto>
void run_read_small(Wave& wave, const Op& op) {
  require_address(wave, op, 1);
  const auto base = load<u32>(wave, op, 1);
  const u32 number = issue(wave, kLds);
  const int reg = op.operand[0].reg;
  for_each_lane(wave.exec(), [&](int lane) {
    const u32 address = base[lane] + u32(op.offset0);
    if (!in_lds(wave, op, lane, address, kBytes, kBytes)) return;
    note(wave, op, lane, address, kBytes, LdsAccess::read, number, false);
    const u32 old = wave.v[reg][lane];
    const Halves before = wave.v_defined[reg];
    const u64 lost = wave.target->d16_keeps_half() ? 0 : u64(1) << lane;
    copy_in(wave, reg, lane, address, kBytes);
    u32& value = wave.v[reg][lane];
    if (kSigned) value = u32(std::int32_t(value << (32 - 8 * kBytes)) >> (32 - 8 * kBytes));
    if constexpr (kInto == Into::low_keep) {
      value = (value & 0xffff) | (old & 0xffff0000u);
      wave.v_defined[reg].hi = before.hi & ~lost;
    } else if constexpr (kInto == Into::high_keep) {
      value = value << 16 | (old & 0xffff);
      wave.v_defined[reg].lo = before.lo & ~lost;
    }
  });
  mark_pending(wave, op.operand[0], kLds, number, 1);
}

// Atomic update of a word; the old value is returned when there is a result.
template <class F, bool kReturns>
void run_atomic(Wave& wave, const Op& op) {
  const int address_operand = kReturns ? 1 : 0;
  require_address(wave, op, address_operand);
  const auto base = load<u32>(wave, op, address_operand), operand = load<u32>(wave, op, address_operand + 1);
  const u64 defined = value_defined<u32>(wave, op, address_operand + 1);
  const u32 number = issue(wave, kLds);
  for_each_lane(wave.exec(), [&](int lane) {
    const u32 address = base[lane] + u32(op.offset0);
    if (!in_lds(wave, op, lane, address, 4, 4)) return;
    note(wave, op, lane, address, 4, LdsAccess::atomic, number, false);
    u32 old;
    std::memcpy(&old, wave.group->lds.data(address), 4);
    const u32 value = F{}(old, operand[lane]);
    const bool known = (defined >> lane & 1) && wave.group->lds.defined(address / 4) == 3;
    if constexpr (kReturns) copy_in(wave, op.operand[0].reg, lane, address, 4);
    std::memcpy(wave.group->lds.data(address), &value, 4);
    wave.group->lds.set_defined(address / 4, 3, known ? 3 : 0);
  });
  if constexpr (kReturns) mark_pending(wave, op.operand[0], kLds, number, 1);
}

}  // namespace

void note_lds_write(Wave& wave, const Op& op, int lane, u32 address, u32 value, bool defined, u32 number) {
  if (!in_lds(wave, op, lane, address, 4, 4)) return;
  note(wave, op, lane, address, 4, LdsAccess::write, number, true);
  std::memcpy(wave.group->lds.data(address), &value, 4);
  wave.group->lds.set_defined(address / 4, 3, defined ? 3 : 0);
}

void add_lds_permutes(OpcodeTable& table);

void add_lds(OpcodeTable& t) {
  const auto read = [&](Names names, Handler run, u32 traits = 0) {
    t.add(names, {"", run, Class::lds, 1, Literal::b32, traits, 0, 2});
  };
  read({"ds_read_b32", "ds_load_b32"}, run_read<4, 1, 1>);
  read({"ds_read_b64", "ds_load_b64"}, run_read<8, 1, 1>);
  read({"ds_read_b96", "ds_load_b96"}, run_read<12, 1, 1>);
  read({"ds_read_b128", "ds_load_b128"}, run_read<16, 1, 1>);
  read({"ds_read2_b32", "ds_load_2addr_b32"}, run_read<4, 2, 4>);
  read({"ds_read2_b64", "ds_load_2addr_b64"}, run_read<8, 2, 8>);
  read({"ds_read2st64_b32", "ds_load_2addr_stride64_b32"}, run_read<4, 2, 256>);
  read({"ds_read2st64_b64", "ds_load_2addr_stride64_b64"}, run_read<8, 2, 512>);
  read({"ds_read_u16", "ds_load_u16"}, run_read_small<2, false, Into::low_clear>);
  read({"ds_read_i16", "ds_load_i16"}, run_read_small<2, true, Into::low_clear>);
  read({"ds_read_u8", "ds_load_u8"}, run_read_small<1, false, Into::low_clear>);
  read({"ds_read_i8", "ds_load_i8"}, run_read_small<1, true, Into::low_clear>);
  read({"ds_read_u16_d16", "ds_load_u16_d16"}, run_read_small<2, false, Into::low_keep>, kReadsResult);
  read({"ds_read_u16_d16_hi", "ds_load_u16_d16_hi"}, run_read_small<2, false, Into::high_keep>, kReadsResult);
  const auto write = [&](Names names, Handler run, int operands) {
    t.add(names, {"", run, Class::lds, 0, Literal::b32, 0, 0, std::uint8_t(operands)});
  };
  write({"ds_write_b32", "ds_store_b32"}, run_write<4, 1, 1>, 2);
  write({"ds_write_b64", "ds_store_b64"}, run_write<8, 1, 1>, 2);
  write({"ds_write_b96", "ds_store_b96"}, run_write<12, 1, 1>, 2);
  write({"ds_write_b128", "ds_store_b128"}, run_write<16, 1, 1>, 2);
  write({"ds_write2_b32", "ds_store_2addr_b32"}, run_write<4, 2, 4>, 3);
  write({"ds_write2_b64", "ds_store_2addr_b64"}, run_write<8, 2, 8>, 3);
  write({"ds_write2st64_b32", "ds_store_2addr_stride64_b32"}, run_write<4, 2, 256>, 3);
  write({"ds_write2st64_b64", "ds_store_2addr_stride64_b64"}, run_write<8, 2, 512>, 3);
  write({"ds_write_b16", "ds_store_b16"}, run_write<2, 1, 1>, 2);
  write({"ds_write_b8", "ds_store_b8"}, run_write<1, 1, 1>, 2);
  write({"ds_write_b16_d16_hi", "ds_store_b16_d16_hi"}, run_write<2, 1, 1, 16>, 2);
  const auto add_u32 = [](u32 a, u32 b) { return a + b; };
  const auto add_f32 = [](u32 a, u32 b) {
    return std::bit_cast<u32>(std::bit_cast<float>(a) + std::bit_cast<float>(b));
  };
  write({"ds_add_u32"}, run_atomic<decltype(add_u32), false>, 2);
  write({"ds_add_f32"}, run_atomic<decltype(add_f32), false>, 2);
  t.add({"ds_add_rtn_u32"}, {"", run_atomic<decltype(add_u32), true>, Class::lds, 1, Literal::b32, 0, 0, 3});
  t.add({"ds_add_rtn_f32"}, {"", run_atomic<decltype(add_f32), true>, Class::lds, 1, Literal::b32, 0, 0, 3});
  add_lds_permutes(t);
}

}  // namespace gfxsim
