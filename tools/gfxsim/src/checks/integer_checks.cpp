// Models of integer, bit and conversion instructions, in 128-bit arithmetic or bit by bit.
#include <algorithm>

#include "vector_row.h"

namespace gfxsim {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;
__extension__ typedef __int128 i128;

i64 s(u64 x) { return i64(x & 0xffffffff) - (x & 0x80000000 ? i64(1) << 32 : 0); }
u64 w(u64 x) { return x & 0xffffffff; }
i64 s24(u64 x) { return i64(x & 0xffffff) - (x & 0x800000 ? 1 << 24 : 0); }
u64 u24(u64 x) { return x & 0xffffff; }
u64 power(u64 exponent) { return u64(1) << exponent; }

u64 field(u64 x, u64 at, u64 width) {
  u64 out = 0;
  for (u64 i = 0; i < width && at + i < 32; ++i) out |= (x >> (at + i) & 1) << i;
  return out;
}
u64 byte_of(u64 high, u64 low, u64 selector) {
  const u64 both = w(high) << 32 | w(low);
  if (selector > 12) return 0xff;
  if (selector == 12) return 0;
  if (selector > 7) return both >> (16 * (selector - 7) - 1) & 1 ? 0xff : 0;
  return both >> (8 * selector) & 0xff;
}
u64 permuted(u64 a, u64 b, u64 c) {
  return byte_of(a, b, c & 255) | byte_of(a, b, c >> 8 & 255) << 8 | byte_of(a, b, c >> 16 & 255) << 16 |
         byte_of(a, b, c >> 24 & 255) << 24;
}
u64 middle(i64 a, i64 b, i64 c) {
  i64 v[] = {a, b, c};
  std::sort(v, v + 3);
  return u64(v[1]);
}
u64 bfloat(u64 x) {
  if ((x & 0x7fffffff) > 0x7f800000) return (w(x) >> 16) | 0x40;
  const u64 low = x & 0xffff, up = low > 0x8000 || (low == 0x8000 && (x >> 16 & 1));
  return (w(x) >> 16) + up;
}
u64 truncated_half(u64 x) {
  const double value = In::f32(x);
  const u64 nearest = half_of(value);
  const bool above = std::isfinite(value) && std::fabs(In::f16(nearest)) > std::fabs(value);
  return above ? nearest - 1 : nearest;
}

const std::vector<VectorRow> kSums = {
    {"v_add_u32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return x.a + x.b; }},
    {"v_sub_u32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return x.a - x.b; }},
    {"v_subrev_u32_e32 v8, 64, v2", Pool::u32, Gives::u32, [](const In& x) { return x.b - 64; }},
    {"v_add3_u32 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return x.a + x.b + x.c; }},
    {"v_add_lshl_u32 v8, v0, v2, v4", Pool::small, Gives::u32,
     [](const In& x) { return w(x.a + x.b) * power(x.c & 31); }},
    {"v_lshl_add_u32 v8, v0, v2, v4", Pool::small, Gives::u32,
     [](const In& x) { return w(x.a) * power(x.b & 31) + x.c; }},
    {"v_xad_u32 v8, v0, -1, v4", Pool::u32, Gives::u32, [](const In& x) { return ~x.a + x.c; }},
    {"v_lshl_add_u64 v[8:9], v[0:1], 3, v[4:5]", Pool::u32, Gives::u64, [](const In& x) { return x.a * 8 + x.c; }},
    {"v_add_u16_e32 v8, v0, v2", Pool::u32, Gives::f16, [](const In& x) { return (x.a + x.b) & 0xffff; }},
    {"v_sub_u16_e32 v8, v0, v2", Pool::u32, Gives::f16, [](const In& x) { return (x.a - x.b) & 0xffff; }},
    {"v_mul_lo_u16_e32 v8, v0, v2", Pool::u32, Gives::f16, [](const In& x) { return (x.a * x.b) & 0xffff; }},
    {"v_mad_u16 v8, v0, v2, v4", Pool::u32, Gives::f16_kept, [](const In& x) { return (x.a * x.b + x.c) & 0xffff; }},
    {"v_mad_legacy_u16 v8, v0, v2, v4", Pool::u32, Gives::f16, [](const In& x) { return (x.a * x.b + x.c) & 0xffff; },
     nullptr, "gfx942"},
    {"v_add_co_u32_e32 v8, vcc, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return x.a + x.b; },
     [](const In& x) { return w(x.a) + w(x.b) > 0xffffffff; }},
    {"v_sub_co_u32_e64 v8, s[12:13], v0, v2", Pool::u32, Gives::u32, [](const In& x) { return x.a - x.b; },
     [](const In& x) { return w(x.a) < w(x.b); }},
    {"v_subrev_co_u32_e64 v8, s[12:13], v0, v2", Pool::u32, Gives::u32, [](const In& x) { return x.b - x.a; },
     [](const In& x) { return w(x.b) < w(x.a); }},
    {"v_addc_co_u32_e64 v8, s[12:13], v0, v2, s[10:11]", Pool::u32, Gives::u32,
     [](const In& x) { return x.a + x.b + x.mask; }, [](const In& x) { return w(x.a) + w(x.b) + x.mask > 0xffffffff; }},
    {"v_subb_co_u32_e64 v8, s[12:13], v0, v2, s[10:11]", Pool::u32, Gives::u32,
     [](const In& x) { return x.a - x.b - x.mask; }, [](const In& x) { return w(x.a) < w(x.b) + x.mask; }},
    {"v_subbrev_co_u32_e64 v8, s[12:13], v0, v2, s[10:11]", Pool::u32, Gives::u32,
     [](const In& x) { return x.b - x.a - x.mask; }, [](const In& x) { return w(x.b) < w(x.a) + x.mask; }},
    {"v_mad_u64_u32 v[8:9], s[12:13], v0, v2, v[4:5]", Pool::u32, Gives::u64,
     [](const In& x) { return w(x.a) * w(x.b) + x.c; },
     [](const In& x) { return (i128(w(x.a)) * i128(w(x.b)) + i128(x.c)) >> 64 != 0; }},
    {"v_mad_u64_u32 v[8:9], s[12:13], v0, 1.0, v[4:5]", Pool::u32, Gives::u64,
     [](const In& x) { return w(x.a) * 0x3f800000 + x.c; },
     [](const In& x) { return (i128(w(x.a)) * 0x3f800000 + i128(x.c)) >> 64 != 0; }},
    {"v_mad_u64_u32 v[8:9], s[12:13], v0, v2, 1.0", Pool::u32, Gives::u64,
     [](const In& x) { return w(x.a) * w(x.b) + 0x3ff0000000000000; },
     [](const In& x) { return (i128(w(x.a)) * i128(w(x.b)) + 0x3ff0000000000000) >> 64 != 0; }},
    {"v_mad_i64_i32 v[8:9], s[12:13], -0.5, v2, v[4:5]", Pool::u32, Gives::u64,
     [](const In& x) { return u64(i128(s(0xbf000000)) * s(x.b) + i128(i64(x.c))); },
     [](const In& x) {
       const i128 exact = i128(s(0xbf000000)) * s(x.b) + i128(i64(x.c));
       return exact != i128(i64(exact));
     }},
    {"v_mad_i64_i32 v[8:9], s[12:13], v0, v2, v[4:5]", Pool::u32, Gives::u64,
     [](const In& x) { return u64(i128(s(x.a)) * s(x.b) + i128(i64(x.c))); },
     [](const In& x) {
       const i128 exact = i128(s(x.a)) * s(x.b) + i128(i64(x.c));
       return exact != i128(i64(exact));
     }},
    {"v_cndmask_b32_e64 v8, v0, v2, s[10:11]", Pool::u32, Gives::u32, [](const In& x) { return x.mask ? x.b : x.a; }},
    {"v_cndmask_b32_e64 v8, -v0, |v2|, s[10:11]", Pool::f32, Gives::u32,
     [](const In& x) { return x.mask ? x.b & 0x7fffffff : x.a ^ 0x80000000; }},
    {"v_cndmask_b32_e32 v8, v0, v2, vcc", Pool::u32, Gives::u32, [](const In& x) { return x.vcc ? x.b : x.a; }},
    {"v_cndmask_b32_sdwa v8, v0, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_0", Pool::u32,
     Gives::u32, [](const In& x) { return x.vcc ? x.b & 0xffff : x.a; }, nullptr, "gfx942"},
    {"v_add_u32_sdwa v8, v0, sext(v2) dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:BYTE_1",
     Pool::u32, Gives::u32,
     [](const In& x) {
       const u64 total = (x.a >> 24 & 255) + u64(i64(std::int8_t(x.b >> 8)));
       return (x.d & 0xffff) | (total & 0xffff) << 16;
     },
     nullptr, "gfx942"},
};

const std::vector<VectorRow> kProducts = {
    {"v_mul_lo_u32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return w(x.a) * w(x.b); }},
    {"v_mul_hi_u32 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) { return u64(i128(w(x.a)) * i128(w(x.b)) >> 32); }},
    {"v_mul_hi_i32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return u64(i128(s(x.a)) * s(x.b) >> 32); }},
    {"v_mul_u32_u24_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return u24(x.a) * u24(x.b); }},
    {"v_mul_hi_u32_u24_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return u24(x.a) * u24(x.b) >> 32; }},
    {"v_mul_i32_i24_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return u64(s24(x.a) * s24(x.b)); }},
    {"v_mad_u32_u24 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return u24(x.a) * u24(x.b) + x.c; }},
    {"v_mad_i32_i24 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return u64(s24(x.a) * s24(x.b)) + x.c; }},
};

const std::vector<VectorRow> kExtrema = {
    {"v_max_i32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return s(x.a) > s(x.b) ? x.a : x.b; }},
    {"v_min_i32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return s(x.a) < s(x.b) ? x.a : x.b; }},
    {"v_max_u32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return w(x.a) > w(x.b) ? x.a : x.b; }},
    {"v_min_u32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return w(x.a) < w(x.b) ? x.a : x.b; }},
    {"v_max3_i32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return u64(std::max({s(x.a), s(x.b), s(x.c)})); }},
    {"v_min3_i32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return u64(std::min({s(x.a), s(x.b), s(x.c)})); }},
    {"v_max3_u32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return std::max({w(x.a), w(x.b), w(x.c)}); }},
    {"v_min3_u32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return std::min({w(x.a), w(x.b), w(x.c)}); }},
    {"v_med3_i32 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return middle(s(x.a), s(x.b), s(x.c)); }},
    {"v_med3_u32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return middle(i64(w(x.a)), i64(w(x.b)), i64(w(x.c))); }},
    {"v_maxmin_i32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return u64(std::min(std::max(s(x.a), s(x.b)), s(x.c))); }},
    {"v_minmax_i32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return u64(std::max(std::min(s(x.a), s(x.b)), s(x.c))); }},
    {"v_maxmin_u32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return std::min(std::max(w(x.a), w(x.b)), w(x.c)); }},
    {"v_minmax_u32 v8, v0, v2, v4", Pool::u32, Gives::u32,
     [](const In& x) { return std::max(std::min(w(x.a), w(x.b)), w(x.c)); }},
};

const std::vector<VectorRow> kLogic = {
    {"v_mov_b32_e32 v8, v0", Pool::u32, Gives::u32, [](const In& x) { return x.a; }},
    {"v_mov_b32_e32 v8, -16", Pool::u32, Gives::u32, [](const In&) { return u64(0xfffffff0); }},
    {"v_mov_b32_e32 v8, 0.15915494", Pool::u32, Gives::u32, [](const In&) { return u64(0x3e22f983); }},
    {"v_mov_b64_e32 v[8:9], v[0:1]", Pool::u32, Gives::u64, [](const In& x) { return x.a; }},
    {"v_not_b32_e32 v8, v0", Pool::u32, Gives::u32, [](const In& x) { return ~x.a; }},
    {"v_and_b32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return x.a & x.b; }},
    {"v_or_b32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return x.a | x.b; }},
    {"v_xor_b32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return (x.a | x.b) & ~(x.a & x.b); }},
    {"v_xnor_b32_e32 v8, v0, v2", Pool::u32, Gives::u32, [](const In& x) { return (x.a & x.b) | ~(x.a | x.b); }},
    {"v_or3_b32 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return x.a | x.b | x.c; }},
    {"v_xor3_b32 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return x.a ^ (x.b ^ x.c); }},
    {"v_and_or_b32 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return (x.a & x.b) | x.c; }},
    {"v_bfi_b32 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return ((x.b ^ x.c) & x.a) ^ x.c; }},
    {"v_bitop3_b32 v8, v0, v2, v4 bitop3:0xc8", Pool::u32, Gives::u32, [](const In& x) { return x.b & (x.a | x.c); },
     nullptr, "gfx950"},
    {"v_bitop3_b32 v8, v0, v2, v4 bitop3:0x6c", Pool::u32, Gives::u32, [](const In& x) { return x.b ^ (x.a & x.c); },
     nullptr, "gfx950"},
    {"v_bitop3_b32 v8, v0, v2, v4 bitop3:0x35", Pool::u32, Gives::u32,
     [](const In& x) { return w(~((x.a & x.b) | (~x.a & x.c))); }, nullptr, "gfx950"},
    {"v_and_b16 v8, v0, v2", Pool::u32, Gives::f16, [](const In& x) { return x.a & x.b & 0xffff; }},
    {"v_or_b16 v8, v0, v2", Pool::u32, Gives::f16, [](const In& x) { return (x.a | x.b) & 0xffff; }},
    {"v_perm_b32 v8, v0, v2, v4", Pool::u32, Gives::u32, [](const In& x) { return permuted(x.a, x.b, x.c); }},
    {"v_perm_b32 v8, v0, v2, 0x7060302", Pool::u32, Gives::u32,
     [](const In& x) { return (x.a & 0xffff0000) | w(x.b) >> 16; }},
    {"v_perm_b32 v8, v0, v2, 0xc0b0904", Pool::u32, Gives::u32,
     [](const In& x) { return permuted(x.a, x.b, 0x0c0b0904); }},
    {"v_pack_b32_f16 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) { return (x.a & 0xffff) | (x.b & 0xffff) << 16; }},
    {"v_pack_b32_f16 v8, v0, v2 op_sel:[1,1,0]", Pool::u32, Gives::u32,
     [](const In& x) { return (x.a >> 16 & 0xffff) | (x.b & 0xffff0000); }},
};

const std::vector<VectorRow> kShifts = {
    {"v_lshlrev_b32_e32 v8, v0, v2", Pool::small, Gives::u32, [](const In& x) { return w(x.b) * power(x.a & 31); }},
    {"v_lshrrev_b32_e32 v8, v0, v2", Pool::small, Gives::u32, [](const In& x) { return w(x.b) / power(x.a & 31); }},
    {"v_lshlrev_b32_e32 v8, 16, v2", Pool::u32, Gives::u32, [](const In& x) { return x.b << 16; }},
    {"v_lshrrev_b32_e32 v8, 16, v2", Pool::u32, Gives::u32, [](const In& x) { return w(x.b) >> 16; }},
    {"v_lshl_or_b32 v8, v0, v2, v4", Pool::small, Gives::u32,
     [](const In& x) { return (w(x.a) * power(x.b & 31)) | x.c; }},
    {"v_ashrrev_i32_e32 v8, v0, v2", Pool::small, Gives::u32, [](const In& x) { return u64(s(x.b) >> (x.a & 31)); }},
    {"v_lshlrev_b64 v[8:9], v0, v[2:3]", Pool::small, Gives::u64, [](const In& x) { return x.b * power(x.a & 63); }},
    {"v_lshrrev_b64 v[8:9], v0, v[2:3]", Pool::small, Gives::u64, [](const In& x) { return x.b / power(x.a & 63); }},
    {"v_ashrrev_i64 v[8:9], v0, v[2:3]", Pool::small, Gives::u64,
     [](const In& x) { return u64(i128(i64(x.b)) >> (x.a & 63)); }},
    {"v_lshlrev_b16_e32 v8, v0, v2", Pool::small, Gives::f16,
     [](const In& x) { return (x.b & 0xffff) * power(x.a & 15) & 0xffff; }},
    {"v_lshrrev_b16_e32 v8, v0, v2", Pool::small, Gives::f16,
     [](const In& x) { return (x.b & 0xffff) / power(x.a & 15); }},
    {"v_ashrrev_i16_e32 v8, v0, v2", Pool::small, Gives::f16,
     [](const In& x) { return u64(i64(std::int16_t(x.b)) >> (x.a & 15)) & 0xffff; }},
    {"v_alignbit_b32 v8, v0, v2, v4", Pool::small, Gives::u32,
     [](const In& x) { return (w(x.a) << 32 | w(x.b)) / power(x.c & 31); }},
    {"v_alignbyte_b32 v8, v0, v2, v4", Pool::small, Gives::u32,
     [](const In& x) { return (w(x.a) << 32 | w(x.b)) / power(8 * (x.c & 3)); }},
    {"v_bfe_u32 v8, v0, v2, v4", Pool::small, Gives::u32, [](const In& x) { return field(x.a, x.b & 31, x.c & 31); }},
    {"v_bfe_u32 v8, v0, 16, 1", Pool::u32, Gives::u32, [](const In& x) { return x.a >> 16 & 1; }},
    {"v_bfe_i32 v8, v0, 5, 7", Pool::u32, Gives::u32,
     [](const In& x) { return field(x.a, 5, 7) - (x.a >> 11 & 1 ? 128 : 0); }},
    {"v_bfe_i32 v8, v0, 28, 8", Pool::u32, Gives::u32,
     [](const In& x) { return field(x.a, 28, 4) - (x.a >> 31 & 1 ? 16 : 0); }},
    {"v_bfe_i32 v8, v0, 3, 0", Pool::u32, Gives::u32, [](const In&) { return u64(0); }},
    {"v_bfm_b32 v8, v0, v2", Pool::small, Gives::u32,
     [](const In& x) { return (power(x.a & 31) - 1) * power(x.b & 31); }},
    {"v_bfrev_b32_e32 v8, v0", Pool::u32, Gives::u32,
     [](const In& x) {
       u64 out = 0;
       for (int i = 0; i < 32; ++i) out = out << 1 | (x.a >> i & 1);
       return out;
     }},
    {"v_bcnt_u32_b32 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) {
       u64 out = x.b;
       for (int i = 0; i < 32; ++i) out += x.a >> i & 1;
       return out;
     }},
    {"v_ffbh_u32_e32 v8, v0", Pool::small, Gives::u32,
     [](const In& x) {
       for (u64 i = 0; i < 32; ++i)
         if (x.a >> (31 - i) & 1) return i;
       return u64(0xffffffff);
     }},
    {"v_ffbl_b32_e32 v8, v0", Pool::small, Gives::u32,
     [](const In& x) {
       for (u64 i = 0; i < 32; ++i)
         if (x.a >> i & 1) return i;
       return u64(0xffffffff);
     }},
};

const std::vector<VectorRow> kConversions = {
    {"v_cvt_f32_u32_e32 v8, v0", Pool::u32, Gives::f32, [](const In& x) { return bits_of(float(double(w(x.a)))); }},
    {"v_cvt_f32_i32_e32 v8, v0", Pool::u32, Gives::f32, [](const In& x) { return bits_of(float(double(s(x.a)))); }},
    {"v_cvt_u32_f32_e32 v8, v0", Pool::f32, Gives::u32,
     [](const In& x) { return std::isnan(x.fa()) ? 0 : u64(std::clamp(double(x.fa()), 0.0, 4294967295.0)); }},
    {"v_cvt_i32_f32_e32 v8, v0", Pool::f32, Gives::u32,
     [](const In& x) {
       return std::isnan(x.fa()) ? 0 : u64(i64(std::clamp(double(x.fa()), -2147483648.0, 2147483647.0)));
     }},
    {"v_cvt_f32_f16_e32 v8, v0", Pool::f16, Gives::f32, [](const In& x) { return bits_of(float(In::f16(x.a))); }},
    {"v_cvt_f16_f32_e32 v8, v0", Pool::f32, Gives::f16, [](const In& x) { return half_of(x.fa()); }},
    {"v_cvt_f32_f64_e32 v8, v[0:1]", Pool::f64, Gives::f32, [](const In& x) { return bits_of(float(In::f64(x.a))); }},
    {"v_cvt_f64_f32_e32 v[8:9], v0", Pool::f32, Gives::f64, [](const In& x) { return bits_of(double(x.fa())); }},
    {"v_cvt_f64_i32_e32 v[8:9], v0", Pool::u32, Gives::f64, [](const In& x) { return bits_of(double(s(x.a))); }},
    {"v_cvt_f64_u32_e32 v[8:9], v0", Pool::u32, Gives::f64, [](const In& x) { return bits_of(double(w(x.a))); }},
    {"v_cvt_pkrtz_f16_f32 v8, v0, v2", Pool::f32, Gives::pair_f16,
     [](const In& x) { return truncated_half(x.a) | truncated_half(x.b) << 16; }},
    {"v_cvt_pk_f16_f32 v8, v0, v2", Pool::f32, Gives::pair_f16,
     [](const In& x) { return half_of(x.fa()) | half_of(x.fb()) << 16; }, nullptr, "gfx950"},
    {"v_cvt_pk_bf16_f32 v8, v0, v2", Pool::f32, Gives::u32,
     [](const In& x) { return bfloat(x.a) | bfloat(x.b) << 16; }},
    {"v_cvt_f32_ubyte0_e32 v8, v0", Pool::u32, Gives::f32, [](const In& x) { return bits_of(float(x.a % 256)); }},
    {"v_cvt_f32_ubyte1_e32 v8, v0", Pool::u32, Gives::f32, [](const In& x) { return bits_of(float(x.a / 256 % 256)); }},
    {"v_cvt_f32_ubyte2_e32 v8, v0", Pool::u32, Gives::f32,
     [](const In& x) { return bits_of(float(x.a / 65536 % 256)); }},
    {"v_cvt_f32_ubyte3_e32 v8, v0", Pool::u32, Gives::f32,
     [](const In& x) { return bits_of(float(w(x.a) / 16777216)); }},
};

}  // namespace

void add_integer_checks(Checks& checks) {
  for (const auto* rows : {&kSums, &kProducts, &kExtrema, &kLogic, &kShifts, &kConversions}) add_rows(checks, *rows);
}

}  // namespace gfxsim
