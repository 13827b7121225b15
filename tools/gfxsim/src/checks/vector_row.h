// Tables of vector instructions: each row names an instruction and a model of what one lane must get.
//
// Sources are v[0:1] (a), v[2:3] (b) and v[4:5] (c), the result is v8 or v[8:9] (its old value: d). s[10:11] and VCC
// hold a random lane mask each. Values come from pools of special values, all pairs first, then mixed with random ones.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "bench.h"

namespace gfxsim {

enum class Pool { f32, f16, f64, u32, small };
enum class Gives { f32, f32_ulp, f16, f16_kept, f64, u32, u64, pair_f16, pair_f32, mask };

struct In {
  std::uint64_t a, b, c, d;
  bool vcc, mask;  // this lane's bit of VCC and of s[10:11]
  int lane, generation;

  static float f32(std::uint64_t bits) { return std::bit_cast<float>(std::uint32_t(bits)); }
  static double f64(std::uint64_t bits) { return std::bit_cast<double>(bits); }
  static double f16(std::uint64_t bits);  // of the low 16 bits
  float fa() const { return f32(a); }
  float fb() const { return f32(b); }
  float fc() const { return f32(c); }
};

inline std::uint64_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
inline std::uint64_t bits_of(double x) { return std::bit_cast<std::uint64_t>(x); }
// The half nearest to x, ties to even, found by search among all halves.
std::uint64_t half_of(double x);

struct VectorRow {
  const char* instruction;
  Pool pool;
  Gives gives;
  std::uint64_t (*model)(const In& in);
  bool (*flag)(const In& in) = nullptr;  // second result: a lane mask
  const char* target = "";
};

void add_rows(Checks& checks, const std::vector<VectorRow>& rows);

/// Values of a pool that every check goes through.
const std::vector<std::uint64_t>& special_values(Pool pool);
std::uint64_t draw(Bench& bench, Pool pool);

}  // namespace gfxsim
