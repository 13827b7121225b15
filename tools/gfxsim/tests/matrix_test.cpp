// One matrix instruction per wave, through fragments loaded and stored by the documented layouts, against a plain
// product.
#include <cmath>
#include <random>

#include "harness.h"

namespace gfxsim::testing {
namespace {

float from_half(std::uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float magnitude =
      exponent ? std::ldexp(float(1024 + mantissa), exponent - 25) : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -magnitude : magnitude;
}
float from_bfloat(std::uint16_t b) {
  const std::uint32_t bits = std::uint32_t(b) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

struct Case {
  const char *target, *kernel;
  int m, k;
  float (*convert)(std::uint16_t);  // null: fp32
  bool accumulates;
};

class MatrixKernels : public ::testing::TestWithParam<Case> {};

template <class T>
void check_product(const Case& c, std::vector<T>& a, std::vector<T>& b, float (*value)(T)) {
  Device device(c.target);
  const auto module = device.load(read_code_object("matrix", c.target));
  std::vector<float> out(std::size_t(c.m * c.m), 0.5f);
  Arguments arguments(device);
  arguments(a)(b)(out);
  const std::uint32_t threads = std::string(c.target) == "gfx942" ? 64 : 32;
  expect_no_reports(device.launch(*module, c.kernel, {1}, {threads}, 0, arguments.bytes()));
  for (int i = 0; i < c.m; ++i)
    for (int j = 0; j < c.m; ++j) {
      double sum = c.accumulates ? 0.5 : 0.0;
      for (int k = 0; k < c.k; ++k)
        sum += double(value(a[std::size_t(i * c.k + k)])) * value(b[std::size_t(k * c.m + j)]);
      ASSERT_NEAR(out[std::size_t(i * c.m + j)], sum, 1e-5) << i << ", " << j;
    }
}

TEST_P(MatrixKernels, EqualsPlainProduct) {
  const Case& c = GetParam();
  std::mt19937 random(3);
  const auto count = std::size_t(c.m * c.k);
  if (c.convert) {
    // Sign, an exponent near 1 and a random mantissa: of half or bfloat16.
    const bool half = c.convert == from_half;
    const auto draw = [&] {
      const unsigned bits = random();
      return std::uint16_t((bits & 0x8000) | (half ? (13 + (bits >> 16 & 3)) << 10 | (bits & 1023)
                                                   : (125 + (bits >> 16 & 3)) << 7 | (bits & 127)));
    };
    std::vector<std::uint16_t> a(count), b(count);
    for (auto& x : a) x = draw();
    for (auto& x : b) x = draw();
    check_product<std::uint16_t>(c, a, b, c.convert);
  } else {
    std::normal_distribution<float> normal;
    std::vector<float> a(count), b(count);
    for (auto& x : a) x = normal(random);
    for (auto& x : b) x = normal(random);
    check_product<float>(c, a, b, [](float x) { return x; });
  }
}

INSTANTIATE_TEST_SUITE_P(All, MatrixKernels,
                         ::testing::Values(Case{"gfx942", "mfma_32x32x8_f16", 32, 8, from_half, false},
                                           Case{"gfx942", "mfma_32x32x8_bf16", 32, 8, from_bfloat, false},
                                           Case{"gfx942", "mfma_16x16x16_f16", 16, 16, from_half, false},
                                           Case{"gfx942", "mfma_16x16x16_bf16", 16, 16, from_bfloat, true},
                                           Case{"gfx942", "mfma_32x32x2_f32", 32, 2, nullptr, false},
                                           Case{"gfx1100", "wmma_16x16x16_f16", 16, 16, from_half, false},
                                           Case{"gfx1100", "wmma_16x16x16_bf16", 16, 16, from_bfloat, true},
                                           Case{"gfx1201", "wmma_16x16x16_f16", 16, 16, from_half, false},
                                           Case{"gfx1201", "wmma_16x16x16_bf16", 16, 16, from_bfloat, true}),
                         [](const auto& info) { return std::string(info.param.target) + "_" + info.param.kernel; });

}  // namespace
}  // namespace gfxsim::testing
