// Models of LDS instructions: bytes of a copy of LDS.
#include <algorithm>
#include <cstring>

#include "bench.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using Bytes = std::vector<std::uint8_t>;

enum class Fill { plain, low_keep, high_keep };  // how a 16-bit value enters its register

struct Access {
  const char* instruction;
  u32 bytes;       // of one access
  u32 offsets[2];  // in bytes; the second is 0 for single accesses
  int accesses = 1;
  bool is_signed = false;
  Fill fill = Fill::plain;
};

Bytes copy_of_lds(Bench& bench) {
  return Bytes(bench.group().lds.data(0), bench.group().lds.data(0) + Bench::kLdsBytes);
}

// Distinct aligned addresses below 2 KB, so that every offset in use stays inside.
void set_addresses(Bench& bench, u32 bytes) {
  const u32 step = std::max(bytes, 4u);
  std::vector<u32> slots;
  for (u32 at = 0; at + 16 <= 2048; at += step == 12 ? 16 : step) slots.push_back(at);
  for (std::size_t i = slots.size(); i > 1; --i) std::swap(slots[i - 1], slots[bench.word() % i]);
  for (int lane = 0; lane < bench.lanes(); ++lane)
    bench.wave().v[0][lane] = slots[std::size_t(lane)] + (bytes < 4 ? bench.word() % 4 / bytes * bytes : 0);
}

u32 wanted_word(const Access& access, const std::uint8_t* from, u32 before) {
  u32 value = 0;
  std::memcpy(&value, from, std::min(access.bytes, 4u));
  if (access.is_signed)
    value = access.bytes == 1 ? u32(std::int32_t(std::int8_t(value))) : u32(std::int32_t(std::int16_t(value)));
  if (access.fill == Fill::low_keep) return (before & 0xffff0000) | (value & 0xffff);
  if (access.fill == Fill::high_keep) return (before & 0xffff) | value << 16;
  return value;
}

std::string check_read(Bench& bench, const Access& access) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 12; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    set_addresses(bench, access.bytes);
    const Bytes lds = copy_of_lds(bench);
    static thread_local u32 before[16][kMaxLanes];
    for (int reg = 0; reg < 16; ++reg) std::copy_n(wave.v[8 + reg], kMaxLanes, before[reg]);
    if (const std::string problem = bench.execute(access.instruction); !problem.empty()) return problem;
    const u32 words = std::max(access.bytes / 4, 1u);
    for (int lane = 0; lane < wave.lanes; ++lane)
      for (u32 i = 0; i < words * u32(access.accesses); ++i) {
        const u32 at = wave.v[0][lane] + access.offsets[i / words] + i % words * 4;
        const bool active = wave.exec() >> lane & 1;
        const u32 wanted = active ? wanted_word(access, &lds[at], before[i][lane]) : before[i][lane];
        if (wave.v[8 + i][lane] != wanted)
          return "lane " + std::to_string(lane) + ", register " + std::to_string(i) + ": " +
                 hexadecimal(wave.v[8 + i][lane]) + ", not " + hexadecimal(wanted);
      }
    if (copy_of_lds(bench) != lds) return "a read changes LDS";
  }
  return "";
}

std::string check_write(Bench& bench, const Access& access) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 12; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    set_addresses(bench, access.bytes);
    // Where two accesses of different lanes may meet, one lane is enough: their order is not defined.
    if (access.accesses == 2) bench.set_scalar64(kExec, u64(1) << (round % wave.lanes));
    Bytes wanted = copy_of_lds(bench);
    const u32 words = std::max(access.bytes / 4, 1u);
    for (int lane = 0; lane < wave.lanes; ++lane)
      for (u32 i = 0; i < words * u32(access.accesses) && (wave.exec() >> lane & 1); ++i) {
        // Data is v[2:5]; of two accesses, v[2:3] and v[4:5].
        const u32 reg = 2 + (access.accesses == 2 ? i / words * 2 : 0) + i % words;
        const u32 value = wave.v[reg][lane] >> (access.fill == Fill::high_keep ? 16 : 0);
        std::memcpy(&wanted[wave.v[0][lane] + access.offsets[i / words] + i % words * 4], &value,
                    std::min(access.bytes, 4u));
      }
    if (const std::string problem = bench.execute(access.instruction); !problem.empty()) return problem;
    const Bytes got = copy_of_lds(bench);
    for (u32 at = 0; at < Bench::kLdsBytes; ++at)
      if (got[at] != wanted[at])
        return "byte " + std::to_string(at) + ": " + hexadecimal(got[at]) + ", not " + hexadecimal(wanted[at]);
  }
  return "";
}

// All lanes add to few words. The order of float additions is that of lanes.
std::string check_atomic(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  const bool is_float = instruction.find("f32") != std::string::npos,
             returns = instruction.find("_rtn_") != std::string::npos;
  for (int round = 0; round < 12; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    for (int lane = 0; lane < wave.lanes; ++lane) {
      wave.v[0][lane] = bench.word() % 8 * 4;
      wave.v[2][lane] = is_float ? std::bit_cast<u32>(float(int(bench.word() % 1000) - 500)) : bench.word();
    }
    for (u32 at = 0; at < 48; at += 4) {
      const u32 value = is_float ? std::bit_cast<u32>(float(at)) : bench.word();
      std::memcpy(bench.group().lds.data(at), &value, 4);
    }
    Bytes wanted = copy_of_lds(bench);
    u32 old[kMaxLanes];
    std::copy_n(wave.v[8], kMaxLanes, old);
    for (int lane = 0; lane < wave.lanes; ++lane) {
      if (!(wave.exec() >> lane & 1)) continue;
      u32 value;
      std::memcpy(&value, &wanted[wave.v[0][lane] + 8], 4);
      if (returns) old[lane] = value;
      const u32 by = wave.v[2][lane];
      value = is_float ? std::bit_cast<u32>(std::bit_cast<float>(value) + std::bit_cast<float>(by)) : value + by;
      std::memcpy(&wanted[wave.v[0][lane] + 8], &value, 4);
    }
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    if (copy_of_lds(bench) != wanted) return "LDS differs";
    for (int lane = 0; lane < wave.lanes; ++lane)
      if (wave.v[8][lane] != old[lane])
        return "lane " + std::to_string(lane) + " returns " + hexadecimal(wave.v[8][lane]);
  }
  return "";
}

const std::vector<Access> kReads = {
    {"ds_read_b32 v8, v0 offset:40", 4, {40, 0}},
    {"ds_read_b64 v[8:9], v0 offset:8", 8, {8, 0}},
    {"ds_read_b96 v[8:10], v0 offset:16", 12, {16, 0}},
    {"ds_read_b128 v[8:11], v0 offset:1040", 16, {1040, 0}},
    {"ds_read2_b32 v[8:9], v0 offset0:3 offset1:200", 4, {12, 800}, 2},
    {"ds_read2_b64 v[8:11], v0 offset1:16", 8, {0, 128}, 2},
    {"ds_read2st64_b32 v[8:9], v0 offset0:1 offset1:4", 4, {256, 1024}, 2},
    {"ds_read2st64_b64 v[8:11], v0 offset0:1 offset1:2", 8, {512, 1024}, 2},
    {"ds_read_u16 v8, v0 offset:2", 2, {2, 0}},
    {"ds_read_i16 v8, v0 offset:2", 2, {2, 0}, 1, true},
    {"ds_read_u8 v8, v0 offset:5", 1, {5, 0}},
    {"ds_read_i8 v8, v0 offset:5", 1, {5, 0}, 1, true},
    {"ds_read_u16_d16 v8, v0 offset:6", 2, {6, 0}, 1, false, Fill::low_keep},
    {"ds_read_u16_d16_hi v8, v0 offset:6", 2, {6, 0}, 1, false, Fill::high_keep},
};

const std::vector<Access> kWrites = {
    {"ds_write_b32 v0, v2 offset:40", 4, {40, 0}},
    {"ds_write_b64 v0, v[2:3] offset:8", 8, {8, 0}},
    {"ds_write_b96 v0, v[2:4] offset:16", 12, {16, 0}},
    {"ds_write_b128 v0, v[2:5] offset:1040", 16, {1040, 0}},
    {"ds_write2_b32 v0, v2, v4 offset0:3 offset1:255", 4, {12, 1020}, 2},
    {"ds_write2_b64 v0, v[2:3], v[4:5] offset1:240", 8, {0, 1920}, 2},
    {"ds_write2st64_b32 v0, v2, v4 offset0:0 offset1:7", 4, {0, 1792}, 2},
    {"ds_write2st64_b64 v0, v[2:3], v[4:5] offset0:0 offset1:3", 8, {0, 1536}, 2},
    {"ds_write_b16 v0, v2 offset:2", 2, {2, 0}},
    {"ds_write_b8 v0, v2 offset:5", 1, {5, 0}},
    {"ds_write_b16_d16_hi v0, v2 offset:6", 2, {6, 0}, 1, false, Fill::high_keep},
};

}  // namespace

void add_lds_checks(Checks& checks) {
  for (const Access& access : kReads)
    add_check(checks, access.instruction, "",
              [access](Bench& bench, const std::string&) { return check_read(bench, access); });
  for (const Access& access : kWrites)
    add_check(checks, access.instruction, "",
              [access](Bench& bench, const std::string&) { return check_write(bench, access); });
  for (const char* instruction : {"ds_add_u32 v0, v2 offset:8", "ds_add_f32 v0, v2 offset:8",
                                  "ds_add_rtn_u32 v8, v0, v2 offset:8", "ds_add_rtn_f32 v8, v0, v2 offset:8"})
    add_check(checks, instruction, "", check_atomic);
}

}  // namespace gfxsim
