// Models of scalar instructions: sources s[0:1] (a) and s[2:3] (b), result s[8:9] (old value d).
#include "vector_row.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;
__extension__ typedef __int128 i128;

struct Sc {
  u64 a, b, d, exec;
  bool scc;
};
struct Out {
  u64 value;
  bool scc;
};
enum class Width { none, word, pair };

struct ScalarRow {
  const char* instruction;
  Pool pool;
  Width width;
  Out (*model)(const Sc& x);  // the old SCC where the instruction leaves it
};

u64 w(u64 x) { return x & 0xffffffff; }
i64 s(u64 x) { return i64(std::int32_t(x)); }
bool fits(i64 x) { return x == i64(std::int32_t(x)); }
Out set(u64 value) { return {value, value != 0}; }
Out set32(u64 value) { return {w(value), w(value) != 0}; }
int count(u64 x) {
  int out = 0;
  for (; x; x &= x - 1) ++out;
  return out;
}
u64 first_one(u64 x, int from, int step, int n) {
  for (int i = 0; i < n; ++i)
    if (x >> (from + step * i) & 1) return u64(i);
  return 0xffffffff;
}
u64 take(u64 x, u64 at, u64 width, bool is_signed, int size) {
  u64 out = 0;
  for (u64 i = 0; i < width && at + i < u64(size); ++i) out |= (x >> (at + i) & 1) << i;
  if (!is_signed || width == 0) return out;
  const u64 top = at + width > u64(size) ? u64(size) - 1 - at : width - 1;
  if (out >> top & 1)
    for (u64 i = top; i < 64; ++i) out |= u64(1) << i;
  return out;
}
u64 f(double x) { return bits_of(float(x)); }
float fl(u64 x) { return In::f32(x); }
u64 larger(u64 a, u64 b) {
  if (std::isnan(fl(a))) return w(b);
  if (std::isnan(fl(b))) return w(a);
  if (fl(a) == fl(b)) return a & 0x80000000 ? w(b) : w(a);
  return fl(a) > fl(b) ? w(a) : w(b);
}
u64 smaller(u64 a, u64 b) {
  if (std::isnan(fl(a))) return w(b);
  if (std::isnan(fl(b))) return w(a);
  if (fl(a) == fl(b)) return a & 0x80000000 ? w(a) : w(b);
  return fl(a) < fl(b) ? w(a) : w(b);
}

const std::vector<ScalarRow> kArithmetic = {
    {"s_add_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{x.a + x.b, w(x.a) + w(x.b) > 0xffffffff}; }},
    {"s_sub_u32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return Out{x.a - x.b, w(x.a) < w(x.b)}; }},
    {"s_add_i32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{x.a + x.b, !fits(s(x.a) + s(x.b))}; }},
    {"s_sub_i32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{x.a - x.b, !fits(s(x.a) - s(x.b))}; }},
    {"s_addk_i32 s8, 0xff00", Pool::u32, Width::word, [](const Sc& x) { return Out{x.d - 256, !fits(s(x.d) - 256)}; }},
    {"s_mulk_i32 s8, 0xfffb", Pool::u32, Width::word, [](const Sc& x) { return Out{x.d * u64(-5), x.scc}; }},
    {"s_addc_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{x.a + x.b + x.scc, w(x.a) + w(x.b) + x.scc > 0xffffffff}; }},
    {"s_subb_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{x.a - x.b - x.scc, w(x.a) < w(x.b) + x.scc}; }},
    {"s_mul_i32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return Out{x.a * x.b, x.scc}; }},
    {"s_mul_hi_u32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return Out{w(x.a) * w(x.b) >> 32, x.scc}; }},
    {"s_mul_hi_i32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{u64(s(x.a) * s(x.b)) >> 32, x.scc}; }},
    {"s_add_nc_u64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return Out{x.a + x.b, x.scc}; }},
    {"s_sub_nc_u64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return Out{x.a - x.b, x.scc}; }},
    {"s_mul_u64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair,
     [](const Sc& x) { return Out{u64(i128(x.a) * i128(x.b)), x.scc}; }},
    {"s_abs_i32 s8, s0", Pool::u32, Width::word, [](const Sc& x) { return set32(u64(s(x.a) < 0 ? -s(x.a) : s(x.a))); }},
    {"s_max_i32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{s(x.a) < s(x.b) ? x.b : x.a, s(x.a) >= s(x.b)}; }},
    {"s_min_i32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{s(x.a) < s(x.b) ? x.a : x.b, s(x.a) < s(x.b)}; }},
    {"s_max_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{w(x.a) < w(x.b) ? x.b : x.a, w(x.a) >= w(x.b)}; }},
    {"s_min_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{w(x.a) < w(x.b) ? x.a : x.b, w(x.a) < w(x.b)}; }},
    {"s_lshl1_add_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{2 * x.a + x.b, 2 * w(x.a) + w(x.b) > 0xffffffff}; }},
    {"s_lshl2_add_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{4 * x.a + x.b, 4 * w(x.a) + w(x.b) > 0xffffffff}; }},
    {"s_lshl3_add_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{8 * x.a + x.b, 8 * w(x.a) + w(x.b) > 0xffffffff}; }},
    {"s_lshl4_add_u32 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{16 * x.a + x.b, 16 * w(x.a) + w(x.b) > 0xffffffff}; }},
};

const std::vector<ScalarRow> kBits = {
    {"s_mov_b32 s8, s0", Pool::u32, Width::word, [](const Sc& x) { return Out{x.a, x.scc}; }},
    {"s_movk_i32 s8, 0x8001", Pool::u32, Width::word, [](const Sc& x) { return Out{0xffff8001, x.scc}; }},
    {"s_mov_b64 s[8:9], s[0:1]", Pool::u32, Width::pair, [](const Sc& x) { return Out{x.a, x.scc}; }},
    {"s_mov_b64 s[8:9], -2", Pool::u32, Width::pair, [](const Sc& x) { return Out{u64(-2), x.scc}; }},
    {"s_not_b32 s8, s0", Pool::u32, Width::word, [](const Sc& x) { return set32(~x.a); }},
    {"s_not_b64 s[8:9], s[0:1]", Pool::u32, Width::pair, [](const Sc& x) { return set(~x.a); }},
    {"s_and_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(x.a & x.b); }},
    {"s_and_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(x.a & x.b); }},
    {"s_or_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(x.a | x.b); }},
    {"s_or_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(x.a | x.b); }},
    {"s_xor_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(x.a ^ x.b); }},
    {"s_xor_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(x.a ^ x.b); }},
    {"s_andn2_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(x.a & ~x.b); }},
    {"s_andn2_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(x.a & ~x.b); }},
    {"s_orn2_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(x.a | ~x.b); }},
    {"s_orn2_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(x.a | ~x.b); }},
    {"s_nand_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(~(x.a & x.b)); }},
    {"s_nand_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(~(x.a & x.b)); }},
    {"s_nor_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(~(x.a | x.b)); }},
    {"s_nor_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(~(x.a | x.b)); }},
    {"s_xnor_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return set32(~(x.a ^ x.b)); }},
    {"s_xnor_b64 s[8:9], s[0:1], s[2:3]", Pool::u32, Width::pair, [](const Sc& x) { return set(~(x.a ^ x.b)); }},
    {"s_lshl_b32 s8, s0, s2", Pool::small, Width::word, [](const Sc& x) { return set32(x.a << x.b % 32); }},
    {"s_lshr_b32 s8, s0, s2", Pool::small, Width::word, [](const Sc& x) { return set32(w(x.a) >> x.b % 32); }},
    {"s_ashr_i32 s8, s0, s2", Pool::small, Width::word, [](const Sc& x) { return set32(u64(s(x.a) >> x.b % 32)); }},
    {"s_lshl_b64 s[8:9], s[0:1], s2", Pool::small, Width::pair, [](const Sc& x) { return set(x.a << x.b % 64); }},
    {"s_lshr_b64 s[8:9], s[0:1], s2", Pool::small, Width::pair, [](const Sc& x) { return set(x.a >> x.b % 64); }},
    {"s_ashr_i64 s[8:9], s[0:1], s2", Pool::small, Width::pair,
     [](const Sc& x) { return set(u64(i64(x.a) >> x.b % 64)); }},
    {"s_bfe_u32 s8, s0, 0x70005", Pool::u32, Width::word,
     [](const Sc& x) { return set32(take(x.a, 5, 7, false, 32)); }},
    {"s_bfe_u32 s8, s0, 0x20001c", Pool::u32, Width::word,
     [](const Sc& x) { return set32(take(x.a, 28, 32, false, 32)); }},
    {"s_bfe_i32 s8, s0, 0x70005", Pool::u32, Width::word, [](const Sc& x) { return set32(take(x.a, 5, 7, true, 32)); }},
    {"s_bfe_u64 s[8:9], s[0:1], 0x200010", Pool::u32, Width::pair,
     [](const Sc& x) { return set(take(x.a, 16, 32, false, 64)); }},
    {"s_bfe_i64 s[8:9], s[0:1], 0x200010", Pool::u32, Width::pair,
     [](const Sc& x) { return set(take(x.a, 16, 32, true, 64)); }},
    {"s_bfm_b32 s8, s0, s2", Pool::small, Width::word,
     [](const Sc& x) { return Out{((u64(1) << x.a % 32) - 1) << x.b % 32, x.scc}; }},
    {"s_bcnt1_i32_b32 s8, s0", Pool::u32, Width::word, [](const Sc& x) { return set(u64(count(w(x.a)))); }},
    {"s_bcnt1_i32_b64 s8, s[0:1]", Pool::u32, Width::word, [](const Sc& x) { return set(u64(count(x.a))); }},
    {"s_ff1_i32_b32 s8, s0", Pool::small, Width::word,
     [](const Sc& x) { return Out{first_one(x.a, 0, 1, 32), x.scc}; }},
    {"s_ff1_i32_b64 s8, s[0:1]", Pool::u32, Width::word,
     [](const Sc& x) { return Out{first_one(x.a, 0, 1, 64), x.scc}; }},
    {"s_flbit_i32_b32 s8, s0", Pool::small, Width::word,
     [](const Sc& x) { return Out{first_one(x.a, 31, -1, 32), x.scc}; }},
    {"s_flbit_i32_b64 s8, s[0:1]", Pool::u32, Width::word,
     [](const Sc& x) { return Out{first_one(x.a, 63, -1, 64), x.scc}; }},
    {"s_brev_b32 s8, s0", Pool::u32, Width::word,
     [](const Sc& x) {
       u64 out = 0;
       for (int i = 0; i < 32; ++i) out = out << 1 | (x.a >> i & 1);
       return Out{out, x.scc};
     }},
    {"s_sext_i32_i8 s8, s0", Pool::u32, Width::word,
     [](const Sc& x) { return Out{u64(i64(std::int8_t(x.a))), x.scc}; }},
    {"s_sext_i32_i16 s8, s0", Pool::u32, Width::word,
     [](const Sc& x) { return Out{u64(i64(std::int16_t(x.a))), x.scc}; }},
    {"s_pack_ll_b32_b16 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{x.a % 65536 + x.b % 65536 * 65536, x.scc}; }},
    {"s_pack_lh_b32_b16 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{x.a % 65536 + w(x.b) / 65536 * 65536, x.scc}; }},
    {"s_pack_hh_b32_b16 s8, s0, s2", Pool::u32, Width::word,
     [](const Sc& x) { return Out{w(x.a) / 65536 + w(x.b) / 65536 * 65536, x.scc}; }},
    {"s_bitset1_b32 s8, s0", Pool::small, Width::word,
     [](const Sc& x) { return Out{x.d | u64(1) << x.a % 32, x.scc}; }},
    {"s_bitset0_b32 s8, s0", Pool::small, Width::word,
     [](const Sc& x) { return Out{x.d & ~(u64(1) << x.a % 32), x.scc}; }},
    {"s_cselect_b32 s8, s0, s2", Pool::u32, Width::word, [](const Sc& x) { return Out{x.scc ? x.a : x.b, x.scc}; }},
    {"s_cselect_b64 s[8:9], s[0:1], -1", Pool::u32, Width::pair,
     [](const Sc& x) { return Out{x.scc ? x.a : ~u64(0), x.scc}; }},
    {"s_cmov_b32 s8, s0", Pool::u32, Width::word, [](const Sc& x) { return Out{x.scc ? x.a : x.d, x.scc}; }},
};

const std::vector<ScalarRow> kCompare = {
    {"s_cmp_eq_i32 s0, s2", Pool::small, Width::none, [](const Sc& x) { return Out{0, w(x.a) == w(x.b)}; }},
    {"s_cmp_lg_i32 s0, s2", Pool::small, Width::none, [](const Sc& x) { return Out{0, w(x.a) != w(x.b)}; }},
    {"s_cmp_gt_i32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, s(x.a) > s(x.b)}; }},
    {"s_cmp_ge_i32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, s(x.a) >= s(x.b)}; }},
    {"s_cmp_lt_i32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, s(x.a) < s(x.b)}; }},
    {"s_cmp_le_i32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, s(x.a) <= s(x.b)}; }},
    {"s_cmpk_lt_i32 s0, 0xffff", Pool::small, Width::none, [](const Sc& x) { return Out{0, s(x.a) < -1}; }},
    {"s_cmp_eq_u32 s0, s2", Pool::small, Width::none, [](const Sc& x) { return Out{0, w(x.a) == w(x.b)}; }},
    {"s_cmp_lg_u32 s0, s2", Pool::small, Width::none, [](const Sc& x) { return Out{0, w(x.a) != w(x.b)}; }},
    {"s_cmp_gt_u32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, w(x.a) > w(x.b)}; }},
    {"s_cmp_ge_u32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, w(x.a) >= w(x.b)}; }},
    {"s_cmp_lt_u32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, w(x.a) < w(x.b)}; }},
    {"s_cmp_le_u32 s0, s2", Pool::u32, Width::none, [](const Sc& x) { return Out{0, w(x.a) <= w(x.b)}; }},
    {"s_cmpk_lg_u32 s0, 0xffff", Pool::u32, Width::none, [](const Sc& x) { return Out{0, w(x.a) != 0xffff}; }},
    {"s_cmp_eq_u64 s[0:1], s[2:3]", Pool::small, Width::none, [](const Sc& x) { return Out{0, x.a == x.b}; }},
    {"s_cmp_lg_u64 s[0:1], s[2:3]", Pool::small, Width::none, [](const Sc& x) { return Out{0, x.a != x.b}; }},
    {"s_bitcmp0_b32 s0, s2", Pool::small, Width::none, [](const Sc& x) { return Out{0, !(x.a >> x.b % 32 & 1)}; }},
    {"s_bitcmp1_b32 s0, s2", Pool::small, Width::none, [](const Sc& x) { return Out{0, (x.a >> x.b % 32 & 1) != 0}; }},
    {"s_cmp_lt_f32 s0, s2", Pool::f32, Width::none, [](const Sc& x) { return Out{0, fl(x.a) < fl(x.b)}; }},
    {"s_cmp_le_f32 s0, s2", Pool::f32, Width::none, [](const Sc& x) { return Out{0, fl(x.a) <= fl(x.b)}; }},
    {"s_cmp_gt_f32 s0, s2", Pool::f32, Width::none, [](const Sc& x) { return Out{0, fl(x.b) < fl(x.a)}; }},
    {"s_cmp_ge_f32 s0, s2", Pool::f32, Width::none, [](const Sc& x) { return Out{0, fl(x.b) <= fl(x.a)}; }},
    {"s_cmp_eq_f32 s0, s2", Pool::f32, Width::none, [](const Sc& x) { return Out{0, fl(x.a) == fl(x.b)}; }},
    {"s_cmp_lg_f32 s0, s2", Pool::f32, Width::none,
     [](const Sc& x) { return Out{0, !std::isunordered(fl(x.a), fl(x.b)) && fl(x.a) != fl(x.b)}; }},
    {"s_cmp_neq_f32 s0, s2", Pool::f32, Width::none, [](const Sc& x) { return Out{0, fl(x.a) != fl(x.b)}; }},
    {"s_cmp_nlt_f32 s0, s2", Pool::f32, Width::none,
     [](const Sc& x) { return Out{0, std::isunordered(fl(x.a), fl(x.b)) || fl(x.a) >= fl(x.b)}; }},
    {"s_cmp_nle_f32 s0, s2", Pool::f32, Width::none,
     [](const Sc& x) { return Out{0, std::isunordered(fl(x.a), fl(x.b)) || fl(x.a) > fl(x.b)}; }},
    {"s_cmp_ngt_f32 s0, s2", Pool::f32, Width::none,
     [](const Sc& x) { return Out{0, std::isunordered(fl(x.a), fl(x.b)) || fl(x.a) <= fl(x.b)}; }},
    {"s_cmp_nge_f32 s0, s2", Pool::f32, Width::none,
     [](const Sc& x) { return Out{0, std::isunordered(fl(x.a), fl(x.b)) || fl(x.a) < fl(x.b)}; }},
};

const std::vector<ScalarRow> kFloat = {
    {"s_add_f32 s8, s0, s2", Pool::f32, Width::word,
     [](const Sc& x) { return Out{f(double(fl(x.a)) + fl(x.b)), x.scc}; }},
    {"s_sub_f32 s8, s0, s2", Pool::f32, Width::word,
     [](const Sc& x) { return Out{f(double(fl(x.a)) - fl(x.b)), x.scc}; }},
    {"s_mul_f32 s8, s0, s2", Pool::f32, Width::word,
     [](const Sc& x) { return Out{f(double(fl(x.a)) * fl(x.b)), x.scc}; }},
    {"s_max_num_f32 s8, s0, s2", Pool::f32, Width::word, [](const Sc& x) { return Out{larger(x.a, x.b), x.scc}; }},
    {"s_min_num_f32 s8, s0, s2", Pool::f32, Width::word, [](const Sc& x) { return Out{smaller(x.a, x.b), x.scc}; }},
    {"s_fmac_f32 s8, s0, s2", Pool::f32, Width::word,
     [](const Sc& x) { return Out{bits_of(std::fma(fl(x.a), fl(x.b), fl(x.d))), x.scc}; }},
    {"s_fmaak_f32 s8, s0, s2, 0x40490fdb", Pool::f32, Width::word,
     [](const Sc& x) { return Out{bits_of(std::fma(fl(x.a), fl(x.b), fl(0x40490fdb))), x.scc}; }},
    {"s_cvt_f32_u32 s8, s0", Pool::u32, Width::word, [](const Sc& x) { return Out{f(double(w(x.a))), x.scc}; }},
    {"s_cvt_f32_i32 s8, s0", Pool::u32, Width::word, [](const Sc& x) { return Out{f(double(s(x.a))), x.scc}; }},
    {"s_cvt_u32_f32 s8, s0", Pool::f32, Width::word,
     [](const Sc& x) {
       return Out{std::isnan(fl(x.a)) ? 0 : u64(std::fmin(std::fmax(fl(x.a), 0.0), 4294967295.0)), x.scc};
     }},
    {"s_cvt_i32_f32 s8, s0", Pool::f32, Width::word,
     [](const Sc& x) {
       return Out{std::isnan(fl(x.a)) ? 0 : u64(i64(std::fmin(std::fmax(fl(x.a), -2147483648.0), 2147483647.0))),
                  x.scc};
     }},
};

// The new EXEC is checked besides the old one in the result.
struct SaveexecRow {
  const char *word, *pair;
  u64 (*model)(u64 source, u64 exec);
};
const std::vector<SaveexecRow> kSaveexec = {
    {"s_and_saveexec_b32 s8, s0", "s_and_saveexec_b64 s[8:9], s[0:1]", [](u64 a, u64 e) { return a & e; }},
    {"s_or_saveexec_b32 s8, s0", "s_or_saveexec_b64 s[8:9], s[0:1]", [](u64 a, u64 e) { return a | e; }},
    {"s_xor_saveexec_b32 s8, s0", "s_xor_saveexec_b64 s[8:9], s[0:1]", [](u64 a, u64 e) { return a ^ e; }},
    {"s_and_not1_saveexec_b32 s8, s0", "s_and_not1_saveexec_b64 s[8:9], s[0:1]", [](u64 a, u64 e) { return a & ~e; }},
};

std::string check_row(Bench& bench, const ScalarRow& row) {
  Wave& wave = bench.wave();
  const auto& values = special_values(row.pool);
  const std::size_t n = values.size();
  for (std::size_t round = 0; round < n * n + 300; ++round) {
    bench.randomise_scalars();
    if (round % 2) bench.set_scalar(8, u32(values[round / 2 % n]));
    const Sc in{round < n * n ? values[round % n] : draw(bench, row.pool),
                round < n * n ? values[round / n] : draw(bench, row.pool), wave.read64(8), wave.exec(), wave.scc};
    bench.set_scalar64(0, in.a);
    bench.set_scalar64(2, in.b);
    if (const std::string problem = bench.execute(row.instruction); !problem.empty()) return problem;
    const Out wanted = row.model(in);
    const u64 mask = row.width == Width::pair ? ~u64(0) : row.width == Width::word ? 0xffffffff : 0;
    const u64 got = wave.read64(8), expected = (wanted.value & mask) | (in.d & ~mask);
    const bool both_nan = row.pool == Pool::f32 && std::isnan(fl(got)) && std::isnan(fl(expected));
    if ((got != expected && !both_nan) || wave.scc != wanted.scc)
      return "a " + hexadecimal(in.a) + ", b " + hexadecimal(in.b) + ", SCC " + (in.scc ? "1" : "0") + " gives " +
             hexadecimal(got) + ", SCC " + (wave.scc ? "1" : "0") + "; the model says " + hexadecimal(expected) + ", " +
             (wanted.scc ? "1" : "0");
  }
  return "";
}

std::string check_saveexec(Bench& bench, const std::string& instruction, const SaveexecRow& row) {
  Wave& wave = bench.wave();
  for (int round = 0; round < 100; ++round) {
    bench.randomise_scalars();
    bench.choose_exec(2);
    if (round % 10 == 0) bench.set_scalar64(0, round % 20 ? 0 : ~u64(0));
    const bool wide = wave.lanes == 64;
    const u64 mask = wave.all_lanes(), source = wave.read64(0) & mask, exec = wave.exec();
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    const u64 saved = wide ? wave.read64(8) : wave.s[8], wanted = row.model(source, exec) & mask;
    if (saved != exec || wave.exec() != wanted || wave.scc != (wanted != 0)) return "source " + hexadecimal(source);
  }
  return "";
}

}  // namespace

void add_scalar_checks(Checks& checks) {
  for (const auto* rows : {&kArithmetic, &kBits, &kCompare, &kFloat})
    for (const ScalarRow& row : *rows)
      add_check(checks, row.instruction, "", [row](Bench& bench, const std::string&) { return check_row(bench, row); });
  for (const SaveexecRow& row : kSaveexec) {
    const auto run = [row](Bench& bench, const std::string& instruction) {
      return check_saveexec(bench, instruction, row);
    };
    add_check(checks, row.word, "gfx1201", run);
    add_check(checks, row.pair, "gfx942", run);
  }
}

}  // namespace gfxsim
