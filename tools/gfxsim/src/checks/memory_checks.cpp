// Models of global, flat, scratch and scalar memory instructions: bytes of a copy of the buffer.
#include <algorithm>
#include <cstring>

#include "bench.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using Bytes = std::vector<std::uint8_t>;

enum class Fill { plain, low_keep, high_keep };

struct Shape {
  const char *older, *result;  // suffix of the mnemonic; registers of the data
  u32 bytes;
  bool is_signed = false;
  Fill fill = Fill::plain;
};

const std::vector<Shape> kLoads = {
    {"_load_dword", "v8", 4},
    {"_load_dwordx2", "v[8:9]", 8},
    {"_load_dwordx3", "v[8:10]", 12},
    {"_load_dwordx4", "v[8:11]", 16},
    {"_load_ushort", "v8", 2},
    {"_load_sshort", "v8", 2, true},
    {"_load_ubyte", "v8", 1},
    {"_load_sbyte", "v8", 1, true},
    {"_load_short_d16", "v8", 2, false, Fill::low_keep},
    {"_load_short_d16_hi", "v8", 2, false, Fill::high_keep},
};
const std::vector<Shape> kStores = {
    {"_store_dword", "v4", 4},
    {"_store_dwordx2", "v[4:5]", 8},
    {"_store_dwordx3", "v[4:6]", 12},
    {"_store_dwordx4", "v[4:7]", 16},
    {"_store_short", "v4", 2},
    {"_store_byte", "v4", 1},
    {"_store_short_d16_hi", "v4", 2, false, Fill::high_keep},
};

// How a lane's address is given; `offset` is the instruction's own.
enum class Addressing {
  pair,
  base_and_offset,
  scratch,         // a vector register
  scratch_scalar,  // a scalar register
  scratch_fixed,   // the instruction's offset alone
  scratch_flat,    // a flat address of private memory
  buffer,          // through a descriptor: a vector register
  buffer_fixed,    // and the instruction's offset alone
};
bool is_scratch(Addressing how) { return how >= Addressing::scratch; }
bool is_buffer(Addressing how) { return how >= Addressing::buffer; }
bool has_no_vector(Addressing how) {
  return how == Addressing::scratch_scalar || how == Addressing::scratch_fixed || how == Addressing::buffer_fixed;
}

// Every lane a slot of its own; returns each lane's place in the buffer (scratch: in its private memory).
std::vector<u32> set_addresses(Bench& bench, Addressing how, u32 bytes, int offset) {
  std::vector<u32> place;
  const u64 base = bench.buffer_address();
  bench.set_scalar64(2, base + 256);
  for (int lane = 0; lane < bench.lanes(); ++lane) {
    const u32 slot = is_scratch(how) ? 16 : 1024 + u32((lane * 7 + 3) % bench.lanes()) * 32;
    const bool same = has_no_vector(how);
    const u32 at = same ? u32(offset) + (how == Addressing::scratch_scalar ? 16 : 0)
                        : slot + bench.word() % 4 / std::min(bytes, 4u) * std::min(bytes, 4u);
    place.push_back(at);
    const u64 begin = how == Addressing::scratch_flat ? kPrivateAperture : base;
    const u64 address = begin + at - u64(std::int64_t(offset));
    Wave& wave = bench.wave();
    wave.v[0][lane] = how == Addressing::pair || how == Addressing::scratch_flat
                          ? u32(address)
                          : at - u32(offset) - (how == Addressing::base_and_offset ? 256 : 0);
    wave.v[1][lane] = u32(address >> 32);
  }
  if (how == Addressing::scratch_scalar) bench.set_scalar(2, 16);
  if (is_buffer(how)) bench.set_scalar64(4, kPrivateAperture);
  return place;
}

std::uint8_t* memory_of(Bench& bench, Addressing how, int lane) {
  return is_scratch(how) ? bench.wave().scratch + lane * 64 : bench.buffer();
}

std::string operands(Addressing how) {
  if (has_no_vector(how)) return "off";
  return how == Addressing::pair || how == Addressing::scratch_flat ? "v[0:1]" : "v0";
}
std::string base(Addressing how) {
  if (is_buffer(how)) return how == Addressing::buffer ? "s[4:7], 0 offen" : "s[4:7], 0";
  return how == Addressing::base_and_offset ? "s[2:3]" : how == Addressing::scratch_scalar ? "s2" : "off";
}

u32 wanted_word(const Shape& shape, const std::uint8_t* from, u32 before) {
  u32 value = 0;
  std::memcpy(&value, from, std::min(shape.bytes, 4u));
  if (shape.is_signed)
    value = shape.bytes == 1 ? u32(std::int32_t(std::int8_t(value))) : u32(std::int32_t(std::int16_t(value)));
  if (shape.fill == Fill::low_keep) return (before & 0xffff0000) | (value & 0xffff);
  if (shape.fill == Fill::high_keep) return (before & 0xffff) | value << 16;
  return value;
}

std::string check_load(Bench& bench, const std::string& instruction, const Shape& shape, Addressing how, int offset) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 9; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    for (std::uint8_t& byte : bench.group().scratch) byte = std::uint8_t(bench.word());
    const std::vector<u32> place = set_addresses(bench, how, shape.bytes, offset);
    u32 before[4][kMaxLanes];
    for (int reg = 0; reg < 4; ++reg) std::copy_n(wave.v[8 + reg], kMaxLanes, before[reg]);
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < wave.lanes; ++lane)
      for (u32 i = 0; i < 4; ++i) {
        const std::uint8_t* from = memory_of(bench, how, lane) + place[std::size_t(lane)] + 4 * i;
        const bool loaded = (wave.exec() >> lane & 1) && 4 * i < shape.bytes;
        const u32 wanted = loaded ? wanted_word(shape, from, before[i][lane]) : before[i][lane];
        if (wave.v[8 + i][lane] != wanted)
          return "lane " + std::to_string(lane) + ": " + hexadecimal(wave.v[8 + i][lane]) + ", not " +
                 hexadecimal(wanted);
      }
  }
  return "";
}

std::string check_store(Bench& bench, const std::string& instruction, const Shape& shape, Addressing how, int offset) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 9; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    const std::vector<u32> place = set_addresses(bench, how, shape.bytes, offset);
    Bytes wanted(bench.buffer(), bench.buffer() + Bench::kBufferBytes), wanted_scratch = bench.group().scratch;
    for (int lane = 0; lane < wave.lanes; ++lane) {
      if (!(wave.exec() >> lane & 1)) continue;
      std::uint8_t* to = is_scratch(how) ? &wanted_scratch[std::size_t(lane) * 64] : wanted.data();
      for (u32 at = 0; at < shape.bytes; ++at)
        to[place[std::size_t(lane)] + at] =
            std::uint8_t(wave.v[4 + at / 4][lane] >> (8 * (at % 4) + (shape.fill == Fill::high_keep ? 16 : 0)));
    }
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    if (!std::equal(wanted.begin(), wanted.end(), bench.buffer())) return "the buffer differs";
    if (wanted_scratch != bench.group().scratch) return "scratch differs";
  }
  return "";
}

void add_space(Checks& checks, const std::string& prefix, Addressing how, int offset) {
  const std::string between = ", ";
  const std::string end =
      (prefix == "flat" ? "" : ", " + base(how)) + (offset ? " offset:" + std::to_string(offset) : "");
  for (const Shape& shape : kLoads)
    add_check(checks, prefix + shape.older + " " + shape.result + ", " + operands(how) + end, "",
              [=](Bench& bench, const std::string& text) { return check_load(bench, text, shape, how, offset); });
  for (const Shape& shape : kStores)
    add_check(checks,
              prefix + shape.older + " " +
                  (is_buffer(how) ? shape.result + between + operands(how) : operands(how) + between + shape.result) +
                  end,
              "", [=](Bench& bench, const std::string& text) { return check_store(bench, text, shape, how, offset); });
}

struct Atomic {
  const char* name;
  u32 bytes;
  u64 (*model)(u64 old, u64 by);
};
u64 add_floats(u64 a, u64 b) { return std::bit_cast<u32>(std::bit_cast<float>(u32(a)) + std::bit_cast<float>(u32(b))); }
const std::vector<Atomic> kAtomics = {
    {"global_atomic_add", 4, [](u64 a, u64 b) { return a + b; }},
    {"global_atomic_add_x2", 8, [](u64 a, u64 b) { return a + b; }},
    {"global_atomic_umax", 4, [](u64 a, u64 b) { return a < b ? b : a; }},
    {"global_atomic_or", 4, [](u64 a, u64 b) { return a | b; }},
    {"global_atomic_swap", 4, [](u64, u64 b) { return b; }},
    {"global_atomic_add_f32", 4, add_floats},
};

std::string check_atomic(Bench& bench, const std::string& instruction, const Atomic& atomic, bool returns) {
  Wave& wave = bench.wave();
  const bool is_float = instruction.find("f32") != std::string::npos;
  const u32 lane_mask = atomic.bytes == 8 ? 15 : 7;
  for (int round = 0; round < 12; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    bench.set_scalar64(2, bench.buffer_address());
    u64 memory[16];
    for (u64& value : memory) value = is_float ? std::bit_cast<u32>(float(bench.word() % 100)) : bench.word();
    for (int i = 0; i < 16; ++i) std::memcpy(bench.buffer() + 16 + i * int(atomic.bytes), &memory[i], atomic.bytes);
    u64 old[kMaxLanes] = {};
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const u32 slot = bench.word() & lane_mask;
      wave.v[0][lane] = slot * atomic.bytes;
      if (is_float) wave.v[4][lane] = std::bit_cast<u32>(float(int(bench.word() % 200) - 100));
      if (!(wave.exec() >> lane & 1)) continue;
      old[lane] = memory[slot];
      const u64 by = u64(wave.v[5][lane]) << 32 | wave.v[4][lane];
      memory[slot] = atomic.model(memory[slot], atomic.bytes == 8 ? by : u32(by));
      if (atomic.bytes == 4) memory[slot] = u32(memory[slot]);
    }
    u32 before[kMaxLanes];
    std::copy_n(wave.v[8], kMaxLanes, before);
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int i = 0; i < 16; ++i)
      if (std::memcmp(bench.buffer() + 16 + i * int(atomic.bytes), &memory[i], atomic.bytes) != 0)
        return "memory differs";
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const u32 wanted = returns && (wave.exec() >> lane & 1) ? u32(old[lane]) : before[lane];
      if (wave.v[8][lane] != wanted) return "lane " + std::to_string(lane) + " returns " + hexadecimal(wave.v[8][lane]);
    }
  }
  return "";
}

void add_atomics(Checks& checks) {
  for (const Atomic& atomic : kAtomics) {
    const std::string data = atomic.bytes == 8 ? "v[4:5]" : "v4", result = atomic.bytes == 8 ? "v[8:9]" : "v8";
    const std::string name = atomic.name, rest = "v0, " + data + ", s[2:3] offset:16";
    add_check(checks, name + " " + rest, "",
              [=](Bench& bench, const std::string& text) { return check_atomic(bench, text, atomic, false); });
    const auto returning = [=](Bench& bench, const std::string& text) {
      return check_atomic(bench, text, atomic, true);
    };
    add_check(checks, name + " " + result + ", " + rest + " sc0", "gfx942", returning);
    add_check(checks, name + " " + result + ", " + rest + " glc", "gfx1100", returning);
    add_check(checks, name + " " + result + ", " + rest + " th:TH_ATOMIC_RETURN", "gfx1201", returning);
  }
}

std::string check_scalar_load(Bench& bench, const std::string& instruction, int words) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 20; ++round) {
    bench.randomise_registers();
    const u32 at = bench.word() % 1000 * 4;
    bench.set_scalar64(0, bench.buffer_address() + at);
    u32 wanted[kScalarCount];
    std::copy_n(wave.s, int(kScalarCount), wanted);
    std::memcpy(wanted + 16, bench.buffer() + at + 0x20, std::size_t(words) * 4);
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    if (!std::equal(wanted, wanted + int(kScalarCount), wave.s)) return "registers differ";
  }
  return "";
}

// Words of lanes go to consecutive words of LDS after M0 and the offset.
std::string check_load_to_lds(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 9; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    wave.s[kM0] = bench.word() % 100 * 16;
    const std::vector<u32> place = set_addresses(bench, Addressing::pair, 4, 64);
    Bytes wanted(bench.group().lds.data(0), bench.group().lds.data(0) + Bench::kLdsBytes);
    for (int lane = 0; lane < wave.lanes; ++lane)
      if (wave.exec() >> lane & 1)
        std::memcpy(&wanted[wave.s[kM0] + 64 + u32(lane) * 4], bench.buffer() + place[std::size_t(lane)], 4);
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    if (!std::equal(wanted.begin(), wanted.end(), bench.group().lds.data(0))) return "LDS differs";
  }
  return "";
}

}  // namespace

void add_memory_checks(Checks& checks) {
  add_space(checks, "global", Addressing::pair, -64);
  add_space(checks, "global", Addressing::base_and_offset, 64);
  add_space(checks, "flat", Addressing::pair, 0);
  add_space(checks, "flat", Addressing::scratch_flat, 0);
  add_space(checks, "scratch", Addressing::scratch, 8);
  add_space(checks, "scratch", Addressing::scratch_scalar, 8);
  add_space(checks, "scratch", Addressing::scratch_fixed, 24);
  add_space(checks, "buffer", Addressing::buffer, 8);
  add_space(checks, "buffer", Addressing::buffer_fixed, 24);
  add_atomics(checks);
  const std::pair<const char*, int> loads[] = {{"s_load_dword s16", 1},        {"s_load_dwordx2 s[16:17]", 2},
                                               {"s_load_dwordx3 s[16:18]", 3}, {"s_load_dwordx4 s[16:19]", 4},
                                               {"s_load_dwordx8 s[16:23]", 8}, {"s_load_dwordx16 s[16:31]", 16}};
  for (const auto& [name, words] : loads)
    add_check(checks, std::string(name) + ", s[0:1], 0x20", "",
              [words = words](Bench& bench, const std::string& text) { return check_scalar_load(bench, text, words); });
  add_check(checks, "global_load_lds_dword v[0:1], off offset:64", "gfx942", check_load_to_lds);
}

}  // namespace gfxsim
