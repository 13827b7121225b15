#include "vector_row.h"

#include <algorithm>
#include <array>

namespace gfxsim {
namespace {

constexpr int kRounds64 = 15;

using u64 = std::uint64_t;

bool is_nan32(u64 bits) { return (bits & 0x7fffffff) > 0x7f800000; }
bool is_nan16(u64 bits) { return (bits & 0x7fff) > 0x7c00; }

bool same_half(u64 x, u64 y) { return (x & 0xffff) == (y & 0xffff) || (is_nan16(x) && is_nan16(y)); }
bool same_float(u64 x, u64 y) { return std::uint32_t(x) == std::uint32_t(y) || (is_nan32(x) && is_nan32(y)); }

bool within_ulp(u64 x, u64 y) {
  if (same_float(x, y)) return true;
  const auto ordered = [](u64 bits) {
    const std::int64_t magnitude = std::int64_t(bits & 0x7fffffff);
    return bits >> 31 & 1 ? -magnitude : magnitude;
  };
  return !is_nan32(x) && !is_nan32(y) && std::abs(ordered(x) - ordered(y)) <= 1;
}

// What the whole result register(s) must hold.
bool agrees(Gives gives, u64 got, u64 wanted, const In& in) {
  switch (gives) {
    case Gives::f32: return same_float(got, wanted);
    case Gives::f32_ulp: return within_ulp(got, wanted);
    case Gives::f16:
    case Gives::f16_kept: {
      // The other half is cleared by gfx9, but for the instructions that keep it; newer targets always keep it.
      const bool keeps = gives == Gives::f16_kept || in.generation >= 10;
      return same_half(got, wanted) && std::uint16_t(got >> 16) == (keeps ? std::uint16_t(in.d >> 16) : 0);
    }
    case Gives::f64: return got == wanted || (std::isnan(In::f64(got)) && std::isnan(In::f64(wanted)));
    case Gives::u32: return std::uint32_t(got) == std::uint32_t(wanted);
    case Gives::u64: return got == wanted;
    case Gives::pair_f16: return same_half(got, wanted) && same_half(got >> 16, wanted >> 16);
    case Gives::pair_f32: return same_float(got, wanted) && same_float(got >> 32, wanted >> 32);
    case Gives::mask: break;
  }
  return false;
}

struct Vector {
  u64 lane[kMaxLanes];
};

Vector read_pair(const Wave& wave, int reg) {
  Vector out;
  for (int i = 0; i < kMaxLanes; ++i) out.lane[i] = u64(wave.v[reg + 1][i]) << 32 | wave.v[reg][i];
  return out;
}
void write_pair(Wave& wave, int reg, int lane, u64 value) {
  wave.v[reg][lane] = std::uint32_t(value);
  wave.v[reg + 1][lane] = std::uint32_t(value >> 32);
}

// All pairs of special values for a and b in the first rounds; anything afterwards.
void fill_sources(Bench& bench, Pool pool, int round) {
  const auto& values = special_values(pool);
  for (int lane = 0; lane < bench.lanes(); ++lane) {
    const std::size_t at = std::size_t(round * bench.lanes() + lane), n = values.size();
    const bool paired = at < n * n;
    write_pair(bench.wave(), 0, lane, paired ? values[at % n] : draw(bench, pool));
    write_pair(bench.wave(), 2, lane, paired ? values[at / n] : draw(bench, pool));
    write_pair(bench.wave(), 4, lane, draw(bench, pool));
  }
}

std::string describe(const VectorRow& row, const In& in, u64 got, u64 wanted) {
  std::string out = "lane " + std::to_string(in.lane) + ": a " + hexadecimal(in.a) + ", b " + hexadecimal(in.b) +
                    ", c " + hexadecimal(in.c) + ", d " + hexadecimal(in.d) + " gives " + hexadecimal(got);
  return out + (row.gives == Gives::mask ? ", not " : ", the model says ") + hexadecimal(wanted);
}

std::string run_round(Bench& bench, const VectorRow& row, int round) {
  Wave& wave = bench.wave();
  bench.randomise_registers();
  fill_sources(bench, row.pool, round);
  bench.choose_exec(round);
  const Vector a = read_pair(wave, 0), b = read_pair(wave, 2), c = read_pair(wave, 4), d = read_pair(wave, 8);
  const u64 exec = wave.exec(), vcc = wave.read_mask(kVcc), mask = wave.read_mask(10);
  if (const std::string problem = bench.execute(row.instruction); !problem.empty()) return problem;
  const Vector out = read_pair(wave, 8);
  const bool only_mask = row.gives == Gives::mask;
  const int flag_operand = only_mask ? 0 : 1;
  const bool to_exec = only_mask && bench.op().opcode->results == 0;
  const u64 flags = row.flag ? wave.read_mask(to_exec ? int(kExec) : bench.op().operand[flag_operand].reg) : 0;
  for (int lane = 0; lane < bench.lanes(); ++lane) {
    const In in{a.lane[lane],          b.lane[lane],           c.lane[lane], d.lane[lane],
                bool(vcc >> lane & 1), bool(mask >> lane & 1), lane,         bench.target().generation};
    const bool active = exec >> lane & 1;
    if (!only_mask) {
      const u64 got = out.lane[lane];
      const u64 wanted = active ? row.model(in) : in.d;
      if (active ? !agrees(row.gives, got, wanted, in) : got != in.d) return describe(row, in, got, wanted);
    }
    const bool flag_wanted = row.flag && active && row.flag(in);
    if (row.flag && bool(flags >> lane & 1) != flag_wanted)
      return "mask, " + describe(row, in, flags >> lane & 1, flag_wanted);
  }
  return "";
}

}  // namespace

double In::f16(u64 bits) {
  const int exponent = int(bits >> 10 & 31), mantissa = int(bits & 1023);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? std::nan("") : sign * HUGE_VAL;
  return sign * (exponent ? std::ldexp(1024.0 + mantissa, exponent - 25) : std::ldexp(double(mantissa), -24));
}

u64 half_of(double x) {
  const u64 sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  if (std::isnan(x)) return 0x7e00;
  if (magnitude >= 65520.0) return sign | 0x7c00;
  u64 low = 0, high = 0x7c00;  // the greatest half that is not above magnitude
  while (high - low > 1) (In::f16((low + high) / 2) <= magnitude ? low : high) = (low + high) / 2;
  const double below = magnitude - In::f16(low);
  const double above = (low == 0x7bff ? 65536.0 : In::f16(low + 1)) - magnitude;
  const bool up = above < below || (above == below && (low & 1));
  return sign | (low + up);
}

const std::vector<u64>& special_values(Pool pool) {
  static const std::vector<u64> f32 = {0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000,
                                       0x7fc00001, 0x7f800001, 0x00000001, 0x807fffff, 0x00800000, 0x7f7fffff,
                                       0xff7fffff, 0x3f000000, 0x40490fdb, 0x4f000000, 0x4f800000, 0xcf000000,
                                       0x477fe000, 0x477ff000, 0x33000000, 0x38800000, 0x3fc00000, 0x40200000};
  static const std::vector<u64> f16 = {0,      0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e01, 0x0001, 0x83ff,
                                       0x0400, 0x7bff, 0xfbff, 0x3800, 0x3c01, 0x6400, 0x1400, 0x4248, 0x5bff};
  static const std::vector<u64> f64 = {0,
                                       0x8000000000000000,
                                       0x3ff0000000000000,
                                       0xbff8000000000000,
                                       0x7ff0000000000000,
                                       0xfff0000000000000,
                                       0x7ff8000000000001,
                                       0x0000000000000001,
                                       0x0010000000000000,
                                       0x7fefffffffffffff,
                                       0x47efffffe0000000,
                                       0x36a0000000000000,
                                       0x41dfffffffc00000};
  static const std::vector<u64> u32 = {0,
                                       1,
                                       2,
                                       31,
                                       32,
                                       0x7fff,
                                       0x8000,
                                       0xffff,
                                       0x10000,
                                       0xffffff,
                                       0x800000,
                                       0x7fffffff,
                                       0x80000000,
                                       0xffffffff,
                                       0x100000000,
                                       0x7fffffffffffffff,
                                       0x8000000000000000,
                                       0xffffffffffffffff,
                                       0x00007fff80000000};
  static const std::vector<u64> small = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 0xffffffff};
  switch (pool) {
    case Pool::f32: return f32;
    case Pool::f16: return f16;
    case Pool::f64: return f64;
    case Pool::u32: return u32;
    case Pool::small: break;
  }
  return small;
}

u64 draw(Bench& bench, Pool pool) {
  const auto& values = special_values(pool);
  const std::uint32_t choice = bench.word();
  const u64 bits = u64(bench.word()) << 32 | bench.word();
  if (choice % 3 == 0) return values[choice / 3 % values.size()];
  // Numbers whose exponents are close together, so that sums round and cancel.
  if (pool == Pool::f32 && choice % 3 == 1) return (bits & 0x807fffff) | (120 + (choice >> 8) % 16) << 23;
  if (pool == Pool::f16 && choice % 3 == 1)
    return (bits & 0x83ff) | (10 + (choice >> 8) % 10) << 10 | (bits & 0xffff0000);
  if (pool == Pool::f64 && choice % 3 == 1) return (bits & 0x800fffffffffffff) | u64(1016 + (choice >> 8) % 16) << 52;
  return bits;
}

void add_rows(Checks& checks, const std::vector<VectorRow>& rows) {
  for (const VectorRow& row : rows)
    add_check(checks, row.instruction, row.target, [row](Bench& bench, const std::string&) {
      const int rounds = kRounds64 * 64 / bench.lanes();
      for (int round = 0; round < rounds; ++round)
        if (const std::string difference = run_round(bench, row, round); !difference.empty()) return difference;
      return std::string();
    });
}

}  // namespace gfxsim
