// Models of floating point instructions: by double or long double arithmetic rounded once, and by case analysis.
#include <algorithm>

#include "vector_row.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;
constexpr u64 kNan = 0x7fc00000, kInf = 0x7f800000;

bool nan(u64 x) { return (x & 0x7fffffff) > kInf; }
bool signalling(u64 x) { return nan(x) && !(x & 0x400000); }

// Sums and products of floats are exact or rounded harmlessly in double (53 >= 2 * 24 + 2 bits).
u64 sum(u64 a, u64 b) { return bits_of(float(double(In::f32(a)) + In::f32(b))); }
u64 product(u64 a, u64 b) { return bits_of(float(double(In::f32(a)) * In::f32(b))); }
// Exact product, then a sum in 64 bits of mantissa: rounding twice differs only on ties that double catches.
u64 fused(u64 a, u64 b, u64 c) {
  const double p = double(In::f32(a)) * In::f32(b), q = In::f32(c);
  if (!std::isfinite(p) || !std::isfinite(q) || p + q == 0.0) return bits_of(float(p + q));
  // Round to odd in double by the exact error of the sum, then to float.
  const double s = p + q, t = s - p, error = (p - (s - t)) + (q - t);
  u64 bits = bits_of(s);
  if (error != 0.0) bits = ((error < 0) != (s < 0) ? bits - 1 : bits) | 1;
  return bits_of(float(In::f64(bits)));
}

// Ordering keys: total order of non-NaN floats with -0 below +0.
std::int64_t key(u64 x) { return u32(x) >> 31 ? -std::int64_t(x & 0x7fffffff) - 1 : std::int64_t(x & 0x7fffffff); }
u64 larger(u64 a, u64 b) { return nan(a) ? b : nan(b) ? a : key(a) >= key(b) ? a : b; }
u64 smaller(u64 a, u64 b) { return nan(a) ? b : nan(b) ? a : key(a) <= key(b) ? a : b; }
u64 ieee(u64 a, u64 b, u64 other) { return signalling(a) || signalling(b) ? kNan : other; }

// By value, so that zeros of either sign tie; of the two that are left the larger, as AMD's pseudocode has it.
u64 middle(u64 a, u64 b, u64 c) {
  if (nan(a) || nan(b) || nan(c)) return smaller(smaller(a, b), c);
  const float top = std::max({In::f32(a), In::f32(b), In::f32(c)});
  return In::f32(a) == top ? larger(b, c) : In::f32(b) == top ? larger(a, c) : larger(a, b);
}

float flushed(u64 x) { return (x & 0x7f800000) == 0 ? std::copysign(0.0f, In::f32(x)) : In::f32(x); }
u64 flushed_result(long double y) {
  const float f = float(y);
  return bits_of(std::fabs(f) < 0x1p-126f ? std::copysign(0.0f, f) : f);
}

u64 clamped(u64 x) { return nan(x) ? 0 : bits_of(std::min(1.0f, std::max(0.0f, In::f32(x)))); }

u64 h(const In&, double x) { return half_of(x); }
// A half fma: the product and sum of halves need at most 22 + 80 bits; long double rounds to odd by hand.
u64 half_fused(u64 a, u64 b, u64 c) {
  const double p = In::f16(a) * In::f16(b), q = In::f16(c);
  if (!std::isfinite(p) || !std::isfinite(q) || p + q == 0.0) return half_of(p + q);
  const double s = p + q, t = s - p, error = (p - (s - t)) + (q - t);
  u64 bits = bits_of(s);
  if (error != 0.0) bits = ((error < 0) != (s < 0) ? bits - 1 : bits) | 1;
  return half_of(In::f64(bits));
}
u64 larger_half(u64 a, u64 b) {
  const double x = In::f16(a), y = In::f16(b);
  if (std::isnan(x)) return b;
  if (std::isnan(y)) return a;
  if (x == y) return std::signbit(x) ? b : a;
  return x > y ? a : b;
}
u64 smaller_half(u64 a, u64 b) {
  const double x = In::f16(a), y = In::f16(b);
  if (std::isnan(x)) return b;
  if (std::isnan(y)) return a;
  if (x == y) return std::signbit(x) ? a : b;
  return x < y ? a : b;
}

const std::vector<VectorRow> kArithmetic = {
    {"v_add_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return sum(x.a, x.b); }},
    {"v_add_f32_e64 v8, |v0|, -v2", Pool::f32, Gives::f32,
     [](const In& x) { return sum(x.a & 0x7fffffff, x.b ^ 0x80000000); }},
    {"v_add_f32_e64 v8, v0, v2 clamp", Pool::f32, Gives::f32, [](const In& x) { return clamped(sum(x.a, x.b)); }},
    {"v_mul_f32_e64 v8, -|v0|, v2", Pool::f32, Gives::f32, [](const In& x) { return product(x.a | 0x80000000, x.b); }},
    {"v_sub_f32_e32 v8, 1.0, v2", Pool::f32, Gives::f32,
     [](const In& x) { return sum(bits_of(1.0f), x.b ^ 0x80000000); }},
    {"v_sub_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return sum(x.a, x.b ^ 0x80000000); }},
    {"v_subrev_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return sum(x.b, x.a ^ 0x80000000); }},
    {"v_mul_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return product(x.a, x.b); }},
    {"v_mul_f32_e32 v8, 0x3fb8aa3b, v2", Pool::f32, Gives::f32, [](const In& x) { return product(0x3fb8aa3b, x.b); }},
    {"v_fma_f32 v8, v0, v2, v4", Pool::f32, Gives::f32, [](const In& x) { return fused(x.a, x.b, x.c); }},
    {"v_fma_f32 v8, -v0, v2, |v4|", Pool::f32, Gives::f32,
     [](const In& x) { return fused(x.a ^ 0x80000000, x.b, x.c & 0x7fffffff); }},
    {"v_fmac_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return fused(x.a, x.b, x.d); }},
    {"v_fmaak_f32 v8, v0, v2, 0x3fb8aa3b", Pool::f32, Gives::f32,
     [](const In& x) { return fused(x.a, x.b, 0x3fb8aa3b); }},
    {"v_fmamk_f32 v8, v0, 0x3fb8aa3b, v2", Pool::f32, Gives::f32,
     [](const In& x) { return fused(x.a, 0x3fb8aa3b, x.b); }},
    {"v_max_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return ieee(x.a, x.b, larger(x.a, x.b)); }},
    {"v_min_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return ieee(x.a, x.b, smaller(x.a, x.b)); }},
    {"v_max_num_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return larger(x.a, x.b); }},
    {"v_min_num_f32_e32 v8, v0, v2", Pool::f32, Gives::f32, [](const In& x) { return smaller(x.a, x.b); }},
    {"v_max3_num_f32 v8, v0, v2, v4", Pool::f32, Gives::f32, [](const In& x) { return larger(larger(x.a, x.b), x.c); }},
    {"v_min3_num_f32 v8, v0, v2, v4", Pool::f32, Gives::f32,
     [](const In& x) { return smaller(smaller(x.a, x.b), x.c); }},
    {"v_minmax_num_f32 v8, v0, v2, v4", Pool::f32, Gives::f32,
     [](const In& x) { return larger(smaller(x.a, x.b), x.c); }},
    {"v_maxmin_num_f32 v8, v0, v2, v4", Pool::f32, Gives::f32,
     [](const In& x) { return smaller(larger(x.a, x.b), x.c); }},
    {"v_med3_num_f32 v8, v0, v2, v4", Pool::f32, Gives::f32, [](const In& x) { return middle(x.a, x.b, x.c); }},
    {"v_floor_f32_e32 v8, v0", Pool::f32, Gives::f32,
     [](const In& x) { return bits_of(float(std::floor(double(x.fa())))); }},
    {"v_ceil_f32_e32 v8, v0", Pool::f32, Gives::f32,
     [](const In& x) { return bits_of(float(std::ceil(double(x.fa())))); }},
    {"v_trunc_f32_e32 v8, v0", Pool::f32, Gives::f32,
     [](const In& x) { return bits_of(float(std::trunc(double(x.fa())))); }},
    {"v_rndne_f32_e32 v8, v0", Pool::f32, Gives::f32,
     [](const In& x) { return bits_of(float(std::nearbyint(double(x.fa())))); }},
};

const std::vector<VectorRow> kTranscendental = {
    {"v_exp_f32_e32 v8, v0", Pool::f32, Gives::f32_ulp, [](const In& x) { return flushed_result(exp2l(x.fa())); }},
    {"v_log_f32_e32 v8, v0", Pool::f32, Gives::f32_ulp,
     [](const In& x) { return bits_of(float(log2l(flushed(x.a)))); }},
    {"v_rcp_f32_e32 v8, v0", Pool::f32, Gives::f32_ulp,
     [](const In& x) { return flushed_result(1.0L / flushed(x.a)); }},
    {"v_rsq_f32_e32 v8, v0", Pool::f32, Gives::f32_ulp,
     [](const In& x) { return bits_of(float(1.0L / sqrtl(flushed(x.a)))); }},
    {"v_sqrt_f32_e32 v8, v0", Pool::f32, Gives::f32_ulp,
     [](const In& x) { return bits_of(float(sqrtl(flushed(x.a)))); }},
};

const std::vector<VectorRow> kHalves = {
    {"v_add_f16_e32 v8, v0, v2", Pool::f16, Gives::f16, [](const In& x) { return h(x, In::f16(x.a) + In::f16(x.b)); }},
    {"v_add_f16_e64 v8, v0, v2 op_sel:[1,0,0]", Pool::f16, Gives::f16,
     [](const In& x) { return h(x, In::f16(x.a >> 16) + In::f16(x.b)); }},
    {"v_sub_f16_e32 v8, v0, v2", Pool::f16, Gives::f16, [](const In& x) { return h(x, In::f16(x.a) - In::f16(x.b)); }},
    {"v_subrev_f16_e32 v8, v0, v2", Pool::f16, Gives::f16,
     [](const In& x) { return h(x, In::f16(x.b) - In::f16(x.a)); }},
    {"v_mul_f16_e32 v8, v0, v2", Pool::f16, Gives::f16, [](const In& x) { return h(x, In::f16(x.a) * In::f16(x.b)); }},
    {"v_mul_f16_e32 v8, 0.5, v2", Pool::f16, Gives::f16, [](const In& x) { return h(x, 0.5 * In::f16(x.b)); }},
    {"v_fma_f16 v8, v0, v2, v4", Pool::f16, Gives::f16_kept, [](const In& x) { return half_fused(x.a, x.b, x.c); }},
    {"v_fmac_f16_e32 v8, v0, v2", Pool::f16, Gives::f16, [](const In& x) { return half_fused(x.a, x.b, x.d); }, nullptr,
     "gfx1201"},
    {"v_max_num_f16_e32 v8, v0, v2", Pool::f16, Gives::f16, [](const In& x) { return larger_half(x.a, x.b); }},
    {"v_min_num_f16_e32 v8, v0, v2", Pool::f16, Gives::f16, [](const In& x) { return smaller_half(x.a, x.b); }},
};

const std::vector<VectorRow> kDoubles = {
    {"v_add_f64 v[8:9], v[0:1], v[2:3]", Pool::f64, Gives::f64,
     [](const In& x) { return bits_of(In::f64(x.a) + In::f64(x.b)); }},
    {"v_mul_f64 v[8:9], v[0:1], v[2:3]", Pool::f64, Gives::f64,
     [](const In& x) { return bits_of(In::f64(x.a) * In::f64(x.b)); }},
    {"v_mul_f64 v[8:9], v[0:1], 0.5", Pool::f64, Gives::f64, [](const In& x) { return bits_of(In::f64(x.a) * 0.5); }},
    {"v_fma_f64 v[8:9], v[0:1], v[2:3], v[4:5]", Pool::f64, Gives::f64,
     [](const In& x) { return bits_of(std::fma(In::f64(x.a), In::f64(x.b), In::f64(x.c))); }},
};

// ldexp takes an integer: exponents that keep, denormalise and overflow.
std::string check_ldexp(Bench& bench, const std::string& instruction) {
  for (int round = 0; round < 20; ++round) {
    bench.randomise_registers();
    for (int lane = 0; lane < bench.lanes(); ++lane) {
      bench.wave().v[0][lane] = u32(draw(bench, Pool::f32));
      bench.wave().v[2][lane] = u32(int(bench.word() % 400) - 200);
    }
    if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < bench.lanes(); ++lane) {
      const u64 a = bench.wave().v[0][lane], got = bench.wave().v[8][lane];
      const u64 wanted = bits_of(float(double(In::f32(a)) * std::exp2(double(int(bench.wave().v[2][lane])))));
      if (got != wanted && !(nan(got) && nan(wanted)))
        return hexadecimal(a) + " gives " + hexadecimal(got) + ", not " + hexadecimal(wanted);
    }
  }
  return "";
}

// The division sequence that compilers emit, as a whole: its parts only have to add up to the correctly rounded
// quotient.
std::string check_division(Bench& bench, const std::string&) {
  Wave& wave = bench.wave();
  const bool wide = wave.lanes == 64;
  const std::string mask = wide ? "s[12:13]" : "s12", vcc = wide ? "vcc" : "vcc_lo";
  const std::vector<std::string> program = {"v_div_scale_f32 v10, " + mask + ", v2, v2, v0",
                                            "v_div_scale_f32 v11, " + vcc + ", v0, v2, v0",
                                            "v_rcp_f32_e32 v12, v10",
                                            "v_fma_f32 v13, -v10, v12, 1.0",
                                            "v_fmac_f32_e32 v12, v13, v12",
                                            "v_mul_f32_e32 v14, v11, v12",
                                            "v_fma_f32 v13, -v10, v14, v11",
                                            "v_fmac_f32_e32 v14, v13, v12",
                                            "v_fma_f32 v13, -v10, v14, v11",
                                            "v_div_fmas_f32 v13, v13, v12, v14",
                                            "v_div_fixup_f32 v8, v13, v2, v0"};
  const auto& values = special_values(Pool::f32);
  for (int round = 0; round < 40; ++round) {
    bench.randomise_registers();
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const std::size_t at = std::size_t(round * wave.lanes + lane), n = values.size();
      wave.v[0][lane] = at < n * n ? u32(values[at % n]) : bench.word();
      wave.v[2][lane] = at < n * n ? u32(values[at / n]) : bench.word();
    }
    for (const std::string& instruction : program)
      if (const std::string problem = bench.execute(instruction); !problem.empty()) return problem;
    for (int lane = 0; lane < wave.lanes; ++lane) {
      const u64 a = wave.v[0][lane], b = wave.v[2][lane], got = wave.v[8][lane];
      const u64 wanted = bits_of(In::f32(a) / In::f32(b));
      // AMD's pseudocode itself makes NaN of a finite quotient that overflows: the scaled reciprocal does.
      const bool overflows = std::isinf(In::f32(wanted)) && std::isfinite(In::f32(a)) && In::f32(b) != 0.0f;
      if (got != wanted && !(nan(got) && (nan(wanted) || overflows)))
        return hexadecimal(a) + " / " + hexadecimal(b) + " gives " + hexadecimal(got) + ", not " + hexadecimal(wanted);
    }
  }
  return "";
}

}  // namespace

void add_float_checks(Checks& checks) {
  add_rows(checks, kArithmetic);
  add_rows(checks, kTranscendental);
  add_rows(checks, kHalves);
  add_rows(checks, kDoubles);
  add_check(checks, "v_ldexp_f32 v8, v0, v2", "", check_ldexp);
  for (const char* instruction : {"v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32"})
    add_check(checks, instruction, "", check_division);
}

}  // namespace gfxsim
