// Integer arithmetic of 16, 32 and 64 bits, one lane at a time.
#include <algorithm>

#include "opcode_table.h"

namespace gfxsim {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

i32 signed24(u32 x) { return i32(x << 8) >> 8; }

void add_sums(OpcodeTable& t) {
  t.vector({"v_add_u32", "v_add_nc_u32"}, [](u32 a, u32 b) { return a + b; });
  t.vector({"v_sub_u32", "v_sub_nc_u32"}, [](u32 a, u32 b) { return a - b; });
  t.vector({"v_subrev_u32", "v_subrev_nc_u32"}, [](u32 a, u32 b) { return b - a; });
  t.vector({"v_add3_u32"}, [](u32 a, u32 b, u32 c) { return a + b + c; });
  t.vector({"v_add_lshl_u32"}, [](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); });
  t.vector({"v_lshl_add_u32"}, [](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; });
  t.vector({"v_xad_u32"}, [](u32 a, u32 b, u32 c) { return (a ^ b) + c; });
  t.vector_upward({"v_lshl_add_u64"}, [](u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; });
  t.vector({"v_add_u16", "v_add_nc_u16"}, [](u16 a, u16 b) { return u16(a + b); });
  t.vector({"v_sub_u16", "v_sub_nc_u16"}, [](u16 a, u16 b) { return u16(a - b); });
  t.vector({"v_mul_lo_u16"}, [](u16 a, u16 b) { return u16(a * b); });
  // gfx9's keeps the high half of the result, as it has op_sel; that of gfx8's encoding clears it.
  t.vector({"v_mad_u16"}, [](u16 a, u16 b, u16 c) { return u16(a * b + c); }, kReadsResult);
  t.vector({"v_mad_legacy_u16"}, [](u16 a, u16 b, u16 c) { return u16(a * b + c); });
}

void add_products(OpcodeTable& t) {
  t.vector({"v_mul_lo_u32"}, [](u32 a, u32 b) { return a * b; });
  t.vector({"v_mul_hi_u32"}, [](u32 a, u32 b) { return u32(u64(a) * b >> 32); });
  t.vector({"v_mul_hi_i32"}, [](u32 a, u32 b) { return u32(u64(i64(i32(a)) * i64(i32(b))) >> 32); });
  t.vector({"v_mul_u32_u24"}, [](u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); });
  t.vector({"v_mul_hi_u32_u24"}, [](u32 a, u32 b) { return u32(u64(a & 0xffffff) * (b & 0xffffff) >> 32); });
  t.vector({"v_mul_i32_i24"}, [](u32 a, u32 b) { return u32(i64(signed24(a)) * signed24(b)); });
  t.vector({"v_mad_u32_u24"}, [](u32 a, u32 b, u32 c) { return (a & 0xffffff) * (b & 0xffffff) + c; });
  t.vector({"v_mad_i32_i24"}, [](u32 a, u32 b, u32 c) { return u32(i64(signed24(a)) * signed24(b)) + c; });
}

void add_extrema(OpcodeTable& t) {
  t.vector({"v_max_i32"}, [](i32 a, i32 b) { return std::max(a, b); });
  t.vector({"v_min_i32"}, [](i32 a, i32 b) { return std::min(a, b); });
  t.vector({"v_max_u32"}, [](u32 a, u32 b) { return std::max(a, b); });
  t.vector({"v_min_u32"}, [](u32 a, u32 b) { return std::min(a, b); });
  t.vector({"v_max3_i32"}, [](i32 a, i32 b, i32 c) { return std::max(std::max(a, b), c); });
  t.vector({"v_min3_i32"}, [](i32 a, i32 b, i32 c) { return std::min(std::min(a, b), c); });
  t.vector({"v_max3_u32"}, [](u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); });
  t.vector({"v_min3_u32"}, [](u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); });
  t.vector({"v_med3_i32"}, [](i32 a, i32 b, i32 c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
  t.vector({"v_med3_u32"}, [](u32 a, u32 b, u32 c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); });
  t.vector({"v_maxmin_i32"}, [](i32 a, i32 b, i32 c) { return std::min(std::max(a, b), c); });
  t.vector({"v_minmax_i32"}, [](i32 a, i32 b, i32 c) { return std::max(std::min(a, b), c); });
  t.vector({"v_maxmin_u32"}, [](u32 a, u32 b, u32 c) { return std::min(std::max(a, b), c); });
  t.vector({"v_minmax_u32"}, [](u32 a, u32 b, u32 c) { return std::max(std::min(a, b), c); });
}

}  // namespace

void add_integer(OpcodeTable& t) {
  add_sums(t);
  add_products(t);
  add_extrema(t);
}

}  // namespace gfxsim
