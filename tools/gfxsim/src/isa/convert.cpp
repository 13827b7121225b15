// Conversions between number formats.
#include "opcode_table.h"

namespace gfxsim {
namespace {

using u32 = std::uint32_t;
using i32 = std::int32_t;

// Toward zero, saturated; NaN becomes 0.
u32 to_u32(float x) { return !(x > 0.0f) ? 0u : x >= 0x1p32f ? ~0u : u32(x); }
i32 to_i32(float x) {
  if (x != x) return 0;
  return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : i32(x);
}

template <int kByte>
void add_byte(OpcodeTable& t, const char* name) {
  t.vector({name}, [](u32 a) { return float(a >> (8 * kByte) & 0xff); });
}

u32 pair(Half low, Half high) { return low.bits | u32(high.bits) << 16; }
u32 pair(Bfloat low, Bfloat high) { return low.bits | u32(high.bits) << 16; }

}  // namespace

void add_convert(OpcodeTable& t) {
  t.vector({"v_cvt_f32_u32"}, [](u32 a) { return float(a); });
  t.vector({"v_cvt_f32_i32"}, [](i32 a) { return float(a); });
  t.vector({"v_cvt_u32_f32"}, [](float a) { return to_u32(a); });
  t.vector({"v_cvt_i32_f32"}, [](float a) { return to_i32(a); });
  t.vector({"v_cvt_f32_f16"}, [](Half a) { return to_float(a); });
  t.vector({"v_cvt_f16_f32"}, [](float a) { return to_half(a); });
  t.vector({"v_cvt_f32_f64"}, [](double a) { return float(a); });
  t.vector({"v_cvt_f64_f32"}, [](float a) { return double(a); });
  t.vector({"v_cvt_f64_i32"}, [](i32 a) { return double(a); });
  t.vector({"v_cvt_f64_u32"}, [](u32 a) { return double(a); });
  t.vector({"v_cvt_pkrtz_f16_f32", "v_cvt_pk_rtz_f16_f32"},
           [](float a, float b) { return pair(to_half_toward_zero(a), to_half_toward_zero(b)); });
  t.vector({"v_cvt_pk_f16_f32"}, [](float a, float b) { return pair(to_half(a), to_half(b)); });
  t.vector({"v_cvt_pk_bf16_f32"}, [](float a, float b) { return pair(to_bfloat(a), to_bfloat(b)); });
  add_byte<0>(t, "v_cvt_f32_ubyte0");
  add_byte<1>(t, "v_cvt_f32_ubyte1");
  add_byte<2>(t, "v_cvt_f32_ubyte2");
  add_byte<3>(t, "v_cvt_f32_ubyte3");
}

}  // namespace gfxsim
