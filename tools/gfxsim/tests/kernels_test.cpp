// Whole kernels, compiled by clang, against plain C++.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "harness.h"

namespace gfxsim::testing {
namespace {

using Kernels = OnTarget;
INSTANTIATE_TEST_SUITE_P(Targets, Kernels, ::testing::Values("gfx942", "gfx1100", "gfx1201"));

std::vector<float> random_floats(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& x : out) x = normal(random);
  return out;
}
std::vector<int> random_ints(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<int> out(count);
  for (int& x : out) x = int(random() >> (random() % 31));
  for (std::size_t i = 0; i < count; i += 3) out[i] = -out[i];
  return out;
}

TEST_P(Kernels, VectorAdd) {
  const auto module = load("basic");
  for (const LaunchOptions& options : all_schedules()) {
    auto a = random_floats(1000), b = random_floats(1000, 2), c = std::vector<float>(1000);
    Arguments arguments(device);
    arguments(a)(b)(c)(1000);
    expect_no_reports(device.launch(*module, "vector_add", {4}, {256}, 0, arguments.bytes(), options));
    for (std::size_t i = 0; i < c.size(); ++i) ASSERT_EQ(c[i], a[i] + b[i]) << i;
  }
}

TEST_P(Kernels, SoftmaxRow) {
  const auto module = load("basic");
  const int rows = 3, n = 700;
  for (const LaunchOptions& options : all_schedules()) {
    auto x = random_floats(rows * n), y = std::vector<float>(rows * n);
    Arguments arguments(device);
    arguments(x)(y)(n);
    expect_no_reports(device.launch(*module, "softmax_row", {rows}, {256}, 0, arguments.bytes(), options));
    for (int row = 0; row < rows; ++row) {
      const float* in = &x[std::size_t(row * n)];
      const double max = *std::max_element(in, in + n);
      double sum = 0;
      for (int i = 0; i < n; ++i) sum += std::exp(in[i] - max);
      for (int i = 0; i < n; ++i) ASSERT_NEAR(y[std::size_t(row * n + i)], std::exp(in[i] - max) / sum, 1e-6);
    }
  }
}

TEST_P(Kernels, LdsSum) {
  const auto module = load("basic");
  for (const LaunchOptions& options : all_schedules()) {
    auto x = random_floats(3 * 256), out = std::vector<float>(3);
    Arguments arguments(device);
    arguments(x)(out);
    expect_no_reports(device.launch(*module, "lds_sum", {3}, {256}, 0, arguments.bytes(), options));
    for (int i = 0; i < 3; ++i)
      ASSERT_NEAR(out[std::size_t(i)], std::accumulate(x.begin() + i * 256, x.begin() + (i + 1) * 256, 0.0), 1e-4);
  }
}

TEST_P(Kernels, Atomics) {
  const auto module = load("basic");
  for (LaunchOptions options : all_schedules()) {
    options.threads = 2;
    const int n = 1000;
    std::vector<unsigned> x(n), bins(16);
    std::vector<float> total(1);
    std::iota(x.begin(), x.end(), 5u);
    Arguments arguments(device);
    arguments(x)(bins)(total)(n);
    expect_no_reports(device.launch(*module, "histogram", {4}, {256}, 0, arguments.bytes(), options));
    std::vector<unsigned> expected(16);
    float sum = 0;
    for (const unsigned value : x) ++expected[value % 16], sum += float(value % 16);
    EXPECT_EQ(bins, expected);
    EXPECT_EQ(total[0], sum);
  }
}

TEST_P(Kernels, DivergentLoop) {
  const auto module = load("basic");
  std::vector<unsigned> x(300), steps(300);
  std::iota(x.begin(), x.end(), 1u);
  Arguments arguments(device);
  arguments(x)(steps)(300);
  expect_no_reports(device.launch(*module, "collatz", {2}, {256}, 0, arguments.bytes()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    unsigned count = 0;
    for (unsigned value = x[i]; value != 1; ++count) value = value & 1 ? 3 * value + 1 : value / 2;
    ASSERT_EQ(steps[i], count) << x[i];
  }
}

TEST_P(Kernels, Arithmetic) {
  const auto module = load("basic");
  const int n = 512;
  auto a = random_ints(n), b = random_ints(n, 2);
  b[5] = 0;
  std::vector<std::int64_t> out(4 * n);
  std::vector<float> floats(4 * n);
  Arguments arguments(device);
  arguments(a)(b)(out)(floats)(n);
  expect_no_reports(device.launch(*module, "arithmetic", {2}, {256}, 0, arguments.bytes()));
  for (std::size_t i = 0; i < n; ++i) {
    const int x = a[i], y = b[i];
    ASSERT_EQ(out[4 * i], std::int64_t(x) * y + (x >> 3)) << i;
    ASSERT_EQ(out[4 * i + 1], y ? x / y : x) << x << " / " << y;
    ASSERT_EQ(out[4 * i + 2], y ? unsigned(x) % unsigned(y) : 0) << x << " % " << y;
    ASSERT_EQ(out[4 * i + 3], std::int64_t(x) < std::int64_t(y) * 128 ? std::int64_t(unsigned(x)) >> 3
                                                                      : (std::int64_t(x) ^ 0x123456789));
    if (y) {
      ASSERT_EQ(floats[4 * i], float(x) / float(y)) << x << " / " << y;
    }
    ASSERT_EQ(floats[4 * i + 1], std::sqrt(float(unsigned(x)))) << x;
    ASSERT_NEAR(floats[4 * i + 3] - float(y), std::log2(std::fabs(float(x)) + 1.0f), 1e-2 * std::fabs(float(y)) + 1e-5);
  }
}

TEST_P(Kernels, Shuffles) {
  const auto module = load("basic");
  const int lanes = GetParam() == "gfx942" ? 64 : 32;
  auto x = random_ints(std::size_t(lanes));
  std::vector<int> out(8 * std::size_t(lanes));
  Arguments arguments(device);
  arguments(x)(out);
  expect_no_reports(device.launch(*module, "shuffles", {1}, {std::uint32_t(lanes)}, 0, arguments.bytes()));
  for (int i = 0; i < lanes; ++i) {
    const int* o = &out[std::size_t(i) * 8];
    const auto at = [&](int lane) { return x[std::size_t(lane)]; };
    EXPECT_EQ(o[0], at(i ^ 1));
    EXPECT_EQ(o[1], at(i ^ 15));
    EXPECT_EQ(o[2], i % 16 ? at(i - 1) : -1);
    EXPECT_EQ(o[3], at(5));
    EXPECT_EQ(o[4], at(0));
    EXPECT_EQ(o[5], at(i ^ 16));
    EXPECT_EQ(o[6], std::count_if(x.begin(), x.end(), [&](int v) { return v > at(5); }));
    EXPECT_EQ(o[7], int(unsigned(at(i ^ 1)) + unsigned(at(i))));
  }
}

TEST_P(Kernels, Transpose) {
  const auto module = load("basic");
  for (const LaunchOptions& options : all_schedules()) {
    const int rows = 64, columns = 96;
    auto x = random_floats(rows * columns), y = std::vector<float>(rows * columns);
    Arguments arguments(device);
    arguments(x)(y)(rows)(columns);
    expect_no_reports(
        device.launch(*module, "transpose", {columns / 32, rows / 32}, {256}, 0, arguments.bytes(), options));
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c) ASSERT_EQ(y[std::size_t(c * rows + r)], x[std::size_t(r * columns + c)]);
  }
}

TEST_P(Kernels, LaunchInfoInThreeDimensions) {
  const auto module = load("basic");
  const Dim3 grid{2, 3, 2}, block{5, 4, 3};
  std::vector<int> out(grid.count() * block.count());
  Arguments arguments(device);
  arguments(out);
  expect_no_reports(device.launch(*module, "launch_info", grid, block, 0, arguments.bytes()));
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], int(i / block.count() * 1000 + i % block.count()));
}

TEST_P(Kernels, Scratch) {
  const auto module = load("basic");
  auto x = random_ints(40);
  std::vector<int> out(64);
  Arguments arguments(device);
  arguments(x)(out)(40);
  expect_no_reports(device.launch(*module, "scratch", {1}, {64}, 0, arguments.bytes()));
  for (int t = 0; t < 64; ++t) {
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) {
      const int at = (x[std::size_t(t % 40)] + i) & 31;
      sum += unsigned(x[std::size_t((t + at) % 40)]) * unsigned(i);
    }
    ASSERT_EQ(unsigned(out[std::size_t(t)]), sum) << t;
  }
}

TEST_P(Kernels, PackedFloat) {
  const auto module = load("basic");
  auto a = random_floats(600), b = random_floats(600, 2), out = std::vector<float>(600);
  Arguments arguments(device);
  arguments(a)(b)(out)(300);
  expect_no_reports(device.launch(*module, "packed_float", {2}, {256}, 0, arguments.bytes()));
  for (std::size_t i = 0; i < 600; ++i) ASSERT_EQ(out[i], std::fma(a[i], b[i], a[i] * b[i]) + b[i]) << i;
}

}  // namespace
}  // namespace gfxsim::testing
