// exp2, log2, reciprocal and roots. Hardware is within 1 ulp; these are within half an ulp and a little. Denormal
// sources and results are flushed, as the hardware's transcendental unit does whatever the mode.
#include "opcode_table.h"

namespace gfxsim {
namespace {

float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// 2^x = 2^n * e^(f ln 2), |f| <= 1/2: the series to f^10 is exact to 1e-14.
float exp2(float x) {
  const double clamped = x > 1024.0f ? 1024.0 : x < -1000.0f ? -1000.0 : double(x);
  const double n = std::nearbyint(clamped);
  const double f = (clamped - n) * 0.69314718055994530942;
  double sum = 1.0;
  for (int k = 10; k > 0; --k) sum = 1.0 + sum * f * (1.0 / k);
  const std::uint64_t scale = std::uint64_t(std::int64_t(n == n ? n : 0.0) + 1023) << 52;
  const float value = float(sum * std::bit_cast<double>(scale));
  return x != x ? x : value < 0x1p-126f ? 0.0f : value;
}

float log2(float x) { return float(std::log2(double(flush(x)))); }

}  // namespace

void add_transcendental(OpcodeTable& t) {
  t.vector({"v_exp_f32"}, [](float x) { return exp2(x); }, 0, Class::trans);
  t.vector({"v_log_f32"}, [](float x) { return log2(x); }, 0, Class::trans);
  t.vector({"v_rcp_f32", "v_rcp_iflag_f32"}, [](float x) { return flush(1.0f / flush(x)); }, 0, Class::trans);
  t.vector({"v_rsq_f32"}, [](float x) { return float(1.0 / std::sqrt(double(flush(x)))); }, 0, Class::trans);
  t.vector({"v_sqrt_f32"}, [](float x) { return std::sqrt(flush(x)); }, 0, Class::trans);
}

}  // namespace gfxsim
