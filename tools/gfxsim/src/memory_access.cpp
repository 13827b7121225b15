#include "memory_access.h"

#include <algorithm>
#include <bit>

#include "workgroup.h"

namespace gfxsim {

Location locate_global(Wave& wave, const Op& op, int lane, std::uint64_t address, std::uint32_t bytes, bool is_write,
                       std::uint32_t alignment) {
  const Buffer* buffer = wave.group->memory.find(address, bytes);
  if (!buffer) {
    report(wave, op, "out-of-bounds", lane,
           (is_write ? "writes " : "reads ") + wave.group->memory.describe(address, bytes));
    return {};
  }
  if (is_write && !buffer->writable) {
    report(wave, op, "out-of-bounds", lane, "writes into the read-only buffer '" + buffer->name + "'");
    return {};
  }
  if (address % std::min(bytes, alignment)) {
    report(wave, op, "misaligned", lane,
           "address " + std::to_string(address) + " of a " + std::to_string(bytes) + "-byte access");
    return {};
  }
  return {reinterpret_cast<std::uint8_t*>(address), nullptr};
}

Location locate_scratch(Wave& wave, const Op& op, int lane, std::uint32_t offset, std::uint32_t bytes) {
  const std::uint32_t size = wave.group->scratch_bytes;
  if (std::uint64_t(offset) + bytes > size) {
    report(
        wave, op, "out-of-bounds", lane,
        std::to_string(bytes) + " bytes at scratch offset " + std::to_string(offset) + " of " + std::to_string(size));
    return {};
  }
  const std::size_t at = std::size_t(lane) * size + offset;
  return {wave.scratch + at, wave.scratch_defined + at};
}

void read_lane(Wave& wave, int reg, int lane, Location from, AccessShape shape) {
  const std::uint64_t bit = std::uint64_t(1) << lane;
  const auto set = [&](std::uint64_t& mask, bool known) { mask = (mask & ~bit) | (known ? bit : 0); };
  const auto known = [&](std::uint32_t first, std::uint32_t count) {
    return !from.defined ||
           std::all_of(from.defined + first, from.defined + first + count, [](auto flag) { return flag; });
  };
  if (shape.bytes >= 4) {
    for (std::uint32_t at = 0; at < shape.bytes; at += 4, ++reg) {
      std::memcpy(&wave.v[reg][lane], from.data + at, 4);
      set(wave.v_defined[reg].lo, known(at, 2));
      set(wave.v_defined[reg].hi, known(at + 2, 2));
    }
    return;
  }
  std::uint32_t value = 0;
  std::memcpy(&value, from.data, shape.bytes);
  const int unused = 32 - 8 * int(shape.bytes);
  if (shape.is_signed) value = std::uint32_t(std::int32_t(value << unused) >> unused);
  std::uint32_t& result = wave.v[reg][lane];
  Halves& defined = wave.v_defined[reg];
  switch (shape.into) {
    case Into::whole:
      result = value;
      set(defined.lo, known(0, shape.bytes));
      return set(defined.hi, known(0, shape.bytes));
    case Into::low_keep:
      result = (value & 0xffff) | (result & 0xffff0000u);
      if (!wave.target->d16_keeps_half()) set(defined.hi, false);
      return set(defined.lo, known(0, shape.bytes));
    case Into::high_keep:
      result = value << 16 | (result & 0xffff);
      if (!wave.target->d16_keeps_half()) set(defined.lo, false);
      return set(defined.hi, known(0, shape.bytes));
  }
}

void write_lane(Wave& wave, const Op& op, int reg, int lane, Location to, AccessShape shape) {
  const bool high = shape.into == Into::high_keep;
  for (std::uint32_t at = 0; at < shape.bytes; at += 4, ++reg) {
    const std::uint32_t count = std::min(shape.bytes - at, 4u);
    const std::uint32_t value = wave.v[reg][lane] >> (high ? 16 : 0);
    const Halves halves = wave.v_defined[reg];
    const bool known = (count < 4 ? (high ? halves.hi : halves.lo) : halves.both()) >> lane & 1;
    std::memcpy(to.data + at, &value, count);
    if (to.defined) {
      std::fill_n(to.defined + at, count, std::uint8_t(known));
    } else if (!known && checking(wave, kCheckUndefined)) {
      report(wave, op, "undefined", lane, "stores a register that was never written");
    }
  }
}

void count_lines(Wave& wave, const Op& op, const std::uint64_t* address, std::uint64_t lanes, std::uint32_t bytes) {
  if (!wave.group->options.statistics) return;
  std::array<std::uint64_t, 2 * kMaxLanes> lines;
  std::size_t count = 0;
  for (; lanes; lanes &= lanes - 1) {
    const std::uint64_t at = address[std::countr_zero(lanes)];
    lines[count++] = at / 128;
    if ((at + bytes - 1) / 128 != at / 128) lines[count++] = (at + bytes - 1) / 128;
    wave.group->counts.global_bytes[op.index] += bytes;
  }
  std::sort(lines.begin(), lines.begin() + count);
  wave.group->counts.global_lines[op.index] +=
      std::uint64_t(std::unique(lines.begin(), lines.begin() + count) - lines.begin());
}

void require_defined_address(Wave& wave, const Op& op, std::uint64_t lanes, std::uint64_t defined) {
  const std::uint64_t missing = lanes & ~defined;
  if (missing && checking(wave, kCheckUndefined))
    report(wave, op, "undefined", std::countr_zero(missing), "the address was never written");
}

}  // namespace gfxsim
