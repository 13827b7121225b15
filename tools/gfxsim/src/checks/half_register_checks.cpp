// Models of instructions on halves of registers (v0.l, v0.h), as gfx11 has them. What is not written stays.
#include "vector_row.h"

namespace gfxsim {
namespace {

using u64 = std::uint64_t;

u64 low(u64 x) { return x & 0xffff; }
u64 high(u64 x) { return x >> 16 & 0xffff; }
u64 with_low(u64 word, u64 half) { return (word & 0xffff0000) | low(half); }
u64 with_high(u64 word, u64 half) { return low(word) | low(half) << 16; }

const std::vector<VectorRow> kRows = {
    {"v_mov_b16_e32 v8.l, v0.h", Pool::u32, Gives::u32, [](const In& x) { return with_low(x.d, high(x.a)); }, nullptr,
     "gfx1100"},
    {"v_mov_b16_e32 v8.h, v0.l", Pool::u32, Gives::u32, [](const In& x) { return with_high(x.d, x.a); }, nullptr,
     "gfx1100"},
    {"v_mov_b16_e32 v8.h, 0", Pool::u32, Gives::u32, [](const In& x) { return with_high(x.d, 0); }, nullptr, "gfx1100"},
    {"v_not_b16_e32 v8.l, v0.h", Pool::u32, Gives::u32, [](const In& x) { return with_low(x.d, 0xffff - high(x.a)); },
     nullptr, "gfx1100"},
    {"v_and_b16 v8.h, v0.l, v2.h op_sel:[0,1,1]", Pool::u32, Gives::u32,
     [](const In& x) {
       u64 half = 0;
       for (int bit = 0; bit < 16; ++bit)
         if ((x.a >> bit) % 2 == 1 && (x.b >> (bit + 16)) % 2 == 1) half += u64(1) << bit;
       return with_high(x.d, half);
     },
     nullptr, "gfx1100"},
    {"v_xor_b16 v8.h, v0.l, v2.h op_sel:[0,1,1]", Pool::u32, Gives::u32,
     [](const In& x) {
       u64 half = 0;
       for (int bit = 0; bit < 16; ++bit)
         if ((x.a >> bit) % 2 != (x.b >> (bit + 16)) % 2) half += u64(1) << bit;
       return with_high(x.d, half);
     },
     nullptr, "gfx1100"},
    {"v_lshrrev_b16 v8.l, 3, v2.h op_sel:[0,1,0]", Pool::u32, Gives::u32,
     [](const In& x) { return with_low(x.d, high(x.b) / 8); }, nullptr, "gfx1100"},
    {"v_add_nc_u16 v8.h, v0.h, v2.l op_sel:[1,0,1]", Pool::u32, Gives::u32,
     [](const In& x) { return with_high(x.d, high(x.a) + low(x.b)); }, nullptr, "gfx1100"},
    {"v_cndmask_b16 v8.h, v0.l, v2.h, vcc_lo", Pool::u32, Gives::u32,
     [](const In& x) { return with_high(x.d, x.vcc ? high(x.b) : x.a); }, nullptr, "gfx1100"},
    {"v_cndmask_b16 v8.l, v0.h, v2.l, s10", Pool::u32, Gives::u32,
     [](const In& x) { return with_low(x.d, x.mask ? x.b : high(x.a)); }, nullptr, "gfx1100"},
    {"v_cvt_f16_f32_e32 v8.h, v0", Pool::f32, Gives::pair_f16,
     [](const In& x) { return with_high(x.d, half_of(x.fa())); }, nullptr, "gfx1100"},
    {"v_cvt_f32_f16_e32 v8, v0.h", Pool::u32, Gives::f32,
     [](const In& x) { return bits_of(float(In::f16(high(x.a)))); }, nullptr, "gfx1100"},
    {"v_cmp_gt_u16_e64 s14, v0.h, v2.l op_sel:[1,0,0]", Pool::u32, Gives::mask, nullptr,
     [](const In& x) { return high(x.a) > low(x.b); }, "gfx1100"},
    {"v_pack_b32_f16 v8, v0.h, v2.l op_sel:[1,0,0]", Pool::u32, Gives::u32,
     [](const In& x) { return high(x.a) | low(x.b) << 16; }, nullptr, "gfx1100"},
};

}  // namespace

void add_half_register_checks(Checks& checks) { add_rows(checks, kRows); }

}  // namespace gfxsim
