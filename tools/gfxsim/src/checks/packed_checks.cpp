// Models of packed and mixed-precision instructions.
#include "vector_row.h"

namespace gfxsim {
namespace {

using u64 = std::uint64_t;

double lo(u64 x) { return In::f16(x); }
double hi(u64 x) { return In::f16(x >> 16); }
u64 pair(double low, double high) { return half_of(low) | half_of(high) << 16; }
u64 pair_of(u64 low, u64 high) { return (low & 0xffff) | (high & 0xffff) << 16; }
float f0(u64 x) { return In::f32(x); }
float f1(u64 x) { return In::f32(x >> 32); }
u64 floats(double low, double high) { return bits_of(float(low)) | bits_of(float(high)) << 32; }

double bigger(double x, double y) {
  if (std::isnan(x)) return y;
  if (std::isnan(y)) return x;
  return x == y ? (std::signbit(x) ? y : x) : std::fmax(x, y);
}
double smaller(double x, double y) { return -bigger(-x, -y); }

// Exact in double but for the sum, which is made odd where it is inexact, so that one rounding is left.
double fused(double a, double b, double c) {
  const double p = a * b;
  if (!std::isfinite(p) || !std::isfinite(c) || p + c == 0.0) return p + c;
  const double s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
  u64 bits = bits_of(s);
  if (error != 0.0) bits = ((error < 0) != (s < 0) ? bits - 1 : bits) | 1;
  return In::f64(bits);
}

u64 half_each(u64 a, u64 b, u64 (*f)(u64, u64)) {
  return pair_of(f(a & 0xffff, b & 0xffff), f(a >> 16 & 0xffff, b >> 16 & 0xffff));
}

const std::vector<VectorRow> kRows = {
    {"v_pk_add_f16 v8, v0, v2", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(lo(x.a) + lo(x.b), hi(x.a) + hi(x.b)); }},
    {"v_pk_add_f16 v8, v0, v2 neg_lo:[0,1] neg_hi:[1,0]", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(lo(x.a) - lo(x.b), hi(x.b) - hi(x.a)); }},
    {"v_pk_add_f16 v8, v0, v2 op_sel:[1,0] op_sel_hi:[0,1]", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(hi(x.a) + lo(x.b), lo(x.a) + hi(x.b)); }},
    {"v_pk_mul_f16 v8, v0, v2", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(lo(x.a) * lo(x.b), hi(x.a) * hi(x.b)); }},
    {"v_pk_mul_f16 v8, v0, 0.5 op_sel_hi:[1,0]", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(lo(x.a) * 0.5, hi(x.a) * 0.5); }},
    {"v_pk_fma_f16 v8, v0, v2, v4", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(fused(lo(x.a), lo(x.b), lo(x.c)), fused(hi(x.a), hi(x.b), hi(x.c))); }},
    {"v_pk_max_f16 v8, v0, v2", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(bigger(lo(x.a), lo(x.b)), bigger(hi(x.a), hi(x.b))); }},
    {"v_pk_min_f16 v8, v0, v2", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair(smaller(lo(x.a), lo(x.b)), smaller(hi(x.a), hi(x.b))); }},
    {"v_pk_add_f32 v[8:9], v[0:1], v[2:3]", Pool::f32, Gives::pair_f32,
     [](const In& x) { return floats(double(f0(x.a)) + f0(x.b), double(f1(x.a)) + f1(x.b)); }},
    {"v_pk_add_f32 v[8:9], v[0:1], v[2:3] op_sel:[0,1] op_sel_hi:[0,0] neg_lo:[0,1] neg_hi:[0,1]", Pool::f32,
     Gives::pair_f32, [](const In& x) { return floats(double(f0(x.a)) - f1(x.b), double(f0(x.a)) - f0(x.b)); }},
    {"v_pk_mul_f32 v[8:9], v[0:1], v[2:3]", Pool::f32, Gives::pair_f32,
     [](const In& x) { return floats(double(f0(x.a)) * f0(x.b), double(f1(x.a)) * f1(x.b)); }},
    {"v_pk_mul_f32 v[8:9], v[0:1], v[2:3] op_sel_hi:[1,0]", Pool::f32, Gives::pair_f32,
     [](const In& x) { return floats(double(f0(x.a)) * f0(x.b), double(f1(x.a)) * f0(x.b)); }},
    {"v_pk_fma_f32 v[8:9], v[0:1], v[2:3], v[4:5]", Pool::f32, Gives::pair_f32,
     [](const In& x) { return floats(fused(f0(x.a), f0(x.b), f0(x.c)), fused(f1(x.a), f1(x.b), f1(x.c))); }},
    {"v_pk_mov_b32 v[8:9], v[0:1], v[2:3] op_sel:[1,0]", Pool::u32, Gives::u64,
     [](const In& x) { return x.a >> 32 | x.b << 32; }},
    {"v_pk_mov_b32 v[8:9], v[0:1], v[2:3] op_sel:[0,1]", Pool::u32, Gives::u64,
     [](const In& x) { return (x.a & 0xffffffff) | (x.b & 0xffffffff00000000); }},
    {"v_pk_add_u16 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) { return half_each(x.a, x.b, [](u64 a, u64 b) { return a + b; }); }},
    {"v_pk_sub_u16 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) { return half_each(x.a, x.b, [](u64 a, u64 b) { return a - b; }); }},
    {"v_pk_mul_lo_u16 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) { return half_each(x.a, x.b, [](u64 a, u64 b) { return a * b; }); }},
    {"v_pk_lshlrev_b16 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) { return half_each(x.a, x.b, [](u64 a, u64 b) { return b << (a % 16); }); }},
    {"v_pk_lshrrev_b16 v8, v0, v2", Pool::u32, Gives::u32,
     [](const In& x) { return half_each(x.a, x.b, [](u64 a, u64 b) { return b >> (a % 16); }); }},
    {"v_fma_mix_f32 v8, v0, v2, v4 op_sel:[1,0,0] op_sel_hi:[1,0,1]", Pool::f16, Gives::f32,
     [](const In& x) { return bits_of(float(fused(hi(x.a), f0(x.b), lo(x.c)))); }},
    {"v_fma_mix_f32 v8, -v0, |v2|, v4", Pool::f32, Gives::f32,
     [](const In& x) { return bits_of(float(fused(-double(f0(x.a)), std::fabs(f0(x.b)), f0(x.c)))); }},
    {"v_fma_mixlo_f16 v8, v0, v2, v4 op_sel_hi:[1,1,1]", Pool::f16, Gives::f16_kept,
     [](const In& x) { return half_of(double(float(fused(lo(x.a), lo(x.b), lo(x.c))))); }},
    {"v_fma_mixhi_f16 v8, v0, v2, v4 op_sel_hi:[1,1,1]", Pool::f16, Gives::pair_f16,
     [](const In& x) { return pair_of(x.d, half_of(double(float(fused(lo(x.a), lo(x.b), lo(x.c)))))); }},
};

}  // namespace

void add_packed_checks(Checks& checks) { add_rows(checks, kRows); }

}  // namespace gfxsim
