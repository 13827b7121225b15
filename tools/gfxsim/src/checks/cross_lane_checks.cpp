// Models of instructions that move data between lanes, DPP controls included.
#include <algorithm>
#include <array>
#include <functional>

#include "bench.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

std::string differs(int lane, u64 got, u64 wanted) {
  return "lane " + std::to_string(lane) + " gives " + hexadecimal(got) + ", not " + hexadecimal(wanted);
}

// v8[i] = v2[source(i)]; what happens without a live source depends on the instruction.
struct Movement {
  std::function<int(int lane, int lanes, const Wave&)> source;  // -1: none
  enum { zero, keep, fetch } inactive = zero;
};

std::string check_movement(Bench& bench, const std::string& instruction, const Movement& movement) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 30; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    u32 before[kMaxLanes], value[kMaxLanes];
    std::copy_n(wave.v[8], kMaxLanes, before);
    std::copy_n(wave.v[2], kMaxLanes, value);
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const int from = movement.source(lane, wave.lanes, wave);
      const bool active = wave.exec() >> lane & 1;
      const bool live = from >= 0 && (movement.inactive == Movement::fetch || (wave.exec() >> from & 1));
      const u32 missing = movement.inactive == Movement::keep ? before[lane] : 0;
      const u32 wanted = !active ? before[lane] : live ? value[from] : missing;
      if (wave.v[8][lane] != wanted) return differs(lane, wave.v[8][lane], wanted);
    }
  }
  return "";
}

void add(Checks& checks, const std::string& instruction, const std::string& target, Movement movement) {
  add_check(checks, instruction, target,
            [movement](Bench& bench, const std::string& text) { return check_movement(bench, text, movement); });
}

void add_dpp(Checks& checks, const std::string& control, const std::function<int(int)>& source,
             const std::string& target = "") {
  const auto from = [source](int lane, int, const Wave&) { return source(lane); };
  add(checks, "v_mov_b32_dpp v8, v2 " + control + " row_mask:0xf bank_mask:0xf", target, {from, Movement::keep});
  add(checks, "v_mov_b32_dpp v8, v2 " + control + " row_mask:0xf bank_mask:0xf bound_ctrl:1", target,
      {from, Movement::zero});
}

int within_row(int lane, int at) { return at < 0 || at > 15 ? -1 : lane / 16 * 16 + at; }

std::string check_masks(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  bench.randomise_registers();
  u32 before[kMaxLanes];
  std::copy_n(wave.v[8], kMaxLanes, before);
  if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
  for (int lane = 0; lane < wave.lanes; ++lane) {
    const bool written = (0xa >> (lane / 16) & 1) && (0x6 >> (lane % 16 / 4) & 1);
    const u32 wanted = written ? wave.v[2][lane / 16 * 16 + 15 - lane % 16] : before[lane];
    if (wave.v[8][lane] != wanted) return differs(lane, wave.v[8][lane], wanted);
  }
  return "";
}

std::string check_readlane(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  const bool is_first = instruction.find("first") != std::string::npos;
  for (int round = 0; round < 100; ++round) {
    bench.randomise_registers();
    bench.choose_exec(2);
    if (round == 0) bench.set_scalar64(kExec, 0);
    int lane = int(wave.s[0]) & (wave.lanes - 1);
    if (is_first)
      for (lane = 0; lane < wave.lanes - 1 && !(wave.exec() >> lane & 1);) ++lane;
    if (is_first && wave.exec() == 0) lane = 0;
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    if (wave.s[8] != wave.v[2][lane]) return differs(lane, wave.s[8], wave.v[2][lane]);
  }
  return "";
}

std::string check_writelane(Bench& bench, const std::string& instruction) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 50; ++round) {
    bench.randomise_registers();
    bench.choose_exec(2);
    u32 wanted[kMaxLanes];
    std::copy_n(wave.v[8], kMaxLanes, wanted);
    wanted[wave.s[2] & u32(wave.lanes - 1)] = wave.s[0];
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < wave.lanes; ++lane)
      if (wave.v[8][lane] != wanted[lane]) return differs(lane, wave.v[8][lane], wanted[lane]);
  }
  return "";
}

std::string check_mbcnt(Bench& bench, const std::string& instruction, int first_lane) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 20; ++round) {
    bench.randomise_registers();
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < wave.lanes; ++lane) {
      u32 wanted = wave.v[4][lane];
      for (int bit = 0; bit < 32 && first_lane + bit < lane; ++bit) wanted += wave.v[2][lane] >> bit & 1;
      if (wave.v[8][lane] != wanted) return differs(lane, wave.v[8][lane], wanted);
    }
  }
  return "";
}

int nibble(const Wave& wave, int lane) { return int(wave.s[lane % 16 < 8 ? 0 : 2] >> (4 * (lane % 8)) & 15); }

std::string check_permute(Bench& bench, const std::string& instruction, u32 offset) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 30; ++round) {
    bench.randomise_registers();
    bench.choose_exec(round);
    u32 wanted[kMaxLanes] = {}, before[kMaxLanes];
    std::copy_n(wave.v[8], kMaxLanes, before);
    for (int lane = 0; lane < wave.lanes; ++lane)
      if (wave.exec() >> lane & 1) wanted[(wave.v[0][lane] + offset) / 4 % u32(wave.lanes)] = wave.v[2][lane];
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const u32 value = wave.exec() >> lane & 1 ? wanted[lane] : before[lane];
      if (wave.v[8][lane] != value) return differs(lane, wave.v[8][lane], value);
    }
  }
  return "";
}

void add_dpp_checks(Checks& checks) {
  add_dpp(checks, "quad_perm:[1,0,3,2]", [](int i) { return i ^ 1; });
  add_dpp(checks, "quad_perm:[3,3,0,1]", [](int i) { return i / 4 * 4 + std::array{3, 3, 0, 1}[std::size_t(i % 4)]; });
  add_dpp(checks, "row_shl:3", [](int i) { return within_row(i, i % 16 + 3); });
  add_dpp(checks, "row_shr:1", [](int i) { return within_row(i, i % 16 - 1); });
  add_dpp(checks, "row_ror:5", [](int i) { return within_row(i, (i + 11) % 16); });
  add_dpp(checks, "row_mirror", [](int i) { return within_row(i, 15 - i % 16); });
  add_dpp(checks, "row_half_mirror", [](int i) { return within_row(i, i % 16 < 8 ? 7 - i % 8 : 15 - i % 8); });
  add_dpp(checks, "row_share:6", [](int i) { return within_row(i, 6); }, "gfx1201");
  add_dpp(checks, "row_xmask:9", [](int i) { return within_row(i, i % 16 ^ 9); }, "gfx1201");
  add_dpp(checks, "row_newbcast:2", [](int i) { return within_row(i, 2); }, "gfx942");
  add_dpp(checks, "row_bcast:15", [](int i) { return i < 16 ? -1 : i / 16 * 16 - 1; }, "gfx942");
  add_dpp(checks, "row_bcast:31", [](int i) { return i < 32 ? -1 : 31; }, "gfx942");
  add_dpp(checks, "wave_shr:1", [](int i) { return i - 1; }, "gfx942");
  add(checks, "v_mov_b32_dpp v8, v2 row_ror:1 row_mask:0xf bank_mask:0xf fi:1", "gfx1201",
      {[](int i, int, const Wave&) { return within_row(i, (i + 15) % 16); }, Movement::fetch});
  add_check(checks, "v_mov_b32_dpp v8, v2 row_mirror row_mask:0xa bank_mask:0x6", "gfx942", check_masks);
}

}  // namespace

void add_cross_lane_checks(Checks& checks) {
  add_dpp_checks(checks);
  add_check(checks, "v_readlane_b32 s8, v2, s0", "", check_readlane);
  add_check(checks, "v_readfirstlane_b32 s8, v2", "", check_readlane);
  add_check(checks, "v_writelane_b32 v8, s0, s2", "", check_writelane);
  add_check(checks, "v_mbcnt_lo_u32_b32 v8, v2, v4", "",
            [](Bench& b, const std::string& t) { return check_mbcnt(b, t, 0); });
  add_check(checks, "v_mbcnt_hi_u32_b32 v8, v2, v4", "",
            [](Bench& b, const std::string& t) { return check_mbcnt(b, t, 32); });
  const auto same_row = [](int i, int, const Wave& wave) { return i / 16 * 16 + nibble(wave, i); };
  const auto other_row = [](int i, int, const Wave& wave) { return (i / 16 ^ 1) * 16 + nibble(wave, i); };
  add(checks, "v_permlane16_b32 v8, v2, s0, s2", "gfx1201", {same_row, Movement::keep});
  add(checks, "v_permlanex16_b32 v8, v2, s0, s2", "gfx1201", {other_row, Movement::keep});
  add(checks, "v_permlanex16_b32 v8, v2, s0, s2 op_sel:[1,0]", "gfx1201", {other_row, Movement::fetch});
  add(checks, "v_permlanex16_b32 v8, v2, s0, s2 op_sel:[0,1]", "gfx1201", {other_row, Movement::zero});
  const auto by_address = [](int i, int lanes, const Wave& wave) { return int(wave.v[0][i] / 4) & (lanes - 1); };
  add(checks, "ds_bpermute_b32 v8, v0, v2", "", {by_address, Movement::zero});
  const auto by_address_and_offset = [](int i, int lanes, const Wave& wave) {
    return int((wave.v[0][i] + 20) / 4) & (lanes - 1);
  };
  add(checks, "ds_bpermute_b32 v8, v0, v2 offset:20", "", {by_address_and_offset, Movement::zero});
  add_check(checks, "ds_permute_b32 v8, v0, v2", "",
            [](Bench& bench, const std::string& text) { return check_permute(bench, text, 0); });
  add_check(checks, "ds_permute_b32 v8, v0, v2 offset:20", "",
            [](Bench& bench, const std::string& text) { return check_permute(bench, text, 20); });
  add(checks, "ds_swizzle_b32 v8, v2 offset:swizzle(SWAP,16)", "",
      {[](int i, int, const Wave&) { return i ^ 16; }, Movement::zero});
  add(checks, "ds_swizzle_b32 v8, v2 offset:swizzle(BROADCAST,8,3)", "",
      {[](int i, int, const Wave&) { return i / 8 * 8 + 3; }, Movement::zero});
  add(checks, "ds_swizzle_b32 v8, v2 offset:swizzle(REVERSE,4)", "",
      {[](int i, int, const Wave&) { return i / 4 * 4 + 3 - i % 4; }, Movement::zero});
  add(checks, "ds_swizzle_b32 v8, v2 offset:swizzle(QUAD_PERM,2,1,0,3)", "",
      {[](int i, int, const Wave&) { return i / 4 * 4 + std::array{2, 1, 0, 3}[std::size_t(i % 4)]; }, Movement::zero});
  add(checks, "ds_swizzle_b32 v8, v2 offset:swizzle(BITMASK_PERM,\"01pip\")", "",
      {[](int i, int, const Wave&) { return (i & 32) + ((i & 7) ^ 2) + 8; }, Movement::zero});
}

}  // namespace gfxsim
