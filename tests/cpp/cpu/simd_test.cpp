// Vector functions and the dropout bits of every instruction set that this machine has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "cpu/cpuid.h"
#include "cpu/simd_functions.h"

// After ours, since it has macros for names such as far.
#if defined(_WIN32)
#if !defined(NOMINMAX)
#define NOMINMAX
#endif
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace flash_attn::testing {
namespace {

std::vector<const SimdFunctions*> available() {
  std::vector<const SimdFunctions*> all{&portable_functions()};
#if defined(FLASH_ATTN_X86)
  const cpu::Features features = cpu::detect_features();
  if (features.avx2) all.push_back(&avx2_functions());
  if (features.avx512) all.push_back(&avx512_functions());
#endif
#if defined(FLASH_ATTN_ARM64)
  all.push_back(&neon_functions());
#endif
  return all;
}

class Simd : public ::testing::TestWithParam<const SimdFunctions*> {};

// Distance to the true value in units of fp32's last place there.
double ulps(float got, double expected) {
  const double unit = std::ldexp(1.0, std::max(std::ilogb(expected), -126) - 23);
  return std::abs(double(got) - expected) / unit;
}

// Calls check(x, f(x)) for every stride-th float of [first, last], by its bits.
template <class Check>
void for_floats(const SimdFunctions& s, void (*f)(const float*, index_t, float*), float first, float last,
                std::uint32_t stride, const Check& check) {
  constexpr int kChunk = 4096;
  std::vector<float> in(kChunk), out(kChunk);
  const std::uint64_t end = bit_cast<std::uint32_t>(last);
  for (std::uint64_t bits = bit_cast<std::uint32_t>(first); bits <= end; bits += std::uint64_t(kChunk) * stride) {
    for (int n = 0; n < kChunk; ++n)
      in[n] = bit_cast<float>(std::uint32_t(std::min<std::uint64_t>(bits + std::uint64_t(n) * stride, end)));
    ASSERT_EQ(kChunk % s.lanes, 0);
    f(in.data(), kChunk, out.data());
    for (int n = 0; n < kChunk; ++n) check(in[n], out[n]);
  }
}

// Every 997th float; FLASH_ATTN_EXHAUSTIVE=1: every float (10^9, minutes).
std::uint32_t stride() { return std::getenv("FLASH_ATTN_EXHAUSTIVE") ? 1 : 997; }

// The greatest error of softmax weights in ulp, of x from `least` to 127.
double worst_weight(const SimdFunctions& s, void (*weight)(const float*, index_t, float*), float least) {
  double worst = 0.0;
  const auto check = [&](float x, float got) {
    const double error = ulps(got, std::exp2(double(x)));
    if (!(error <= worst)) {
      worst = error;
      EXPECT_LE(error, 2.0) << s.name << " at " << x;
    }
  };
  for_floats(s, weight, -0.0f, least, stride(), check);
  for_floats(s, weight, 0.0f, 127.0f, stride(), check);
  return worst;
}

TEST_P(Simd, SoftmaxWeightsWithinTwoUlps) {
  const SimdFunctions& s = *GetParam();
  RecordProperty("worst_ulps", std::to_string(worst_weight(s, s.softmax_weight, -100.0f)));
  RecordProperty("worst_ulps_beside_products",
                 std::to_string(worst_weight(s, s.softmax_weight_beside_products, -75.0f)));
}

// From where sums that hold 1 show nothing of a weight, 2^-100 may be missing of it beside products; below that it is
// 0.
TEST_P(Simd, SmallSoftmaxWeights) {
  const SimdFunctions& s = *GetParam();
  for_floats(s, s.softmax_weight_beside_products, -75.0f, -100.0f, 997, [&](float x, float got) {
    const double weight = std::exp2(double(x));
    EXPECT_NEAR(got, weight, std::ldexp(1.0, -100) + std::ldexp(weight, -22)) << x;
    EXPECT_GE(got, 0.0f) << x;
  });
  for (const auto weight : {s.softmax_weight, s.softmax_weight_beside_products}) {
    for_floats(s, weight, std::nextafter(-100.0f, -101.0f), -3e38f, 9973,
               [&](float x, float got) { EXPECT_EQ(got, 0.0f) << x; });
    std::vector<float> in(s.lanes, -std::numeric_limits<float>::infinity()), out(s.lanes);
    in[1] = std::numeric_limits<float>::quiet_NaN();
    in[2] = 0.0f;
    in[3] = -1.0f;
    weight(in.data(), s.lanes, out.data());
    EXPECT_EQ(out[0], 0.0f);
    EXPECT_TRUE(std::isnan(out[1]));
    EXPECT_EQ(out[2], 1.0f);
    EXPECT_EQ(out[3], 0.5f);
  }
}

TEST_P(Simd, WeightsWhereSubnormalResultsAreFlushed) {
  const SimdFunctions& s = *GetParam();
  if (!s.softmax_weight_flushed) GTEST_SKIP() << s.name << " has no tiles, for which these weights are";
  RecordProperty("worst_ulps", std::to_string(worst_weight(s, s.softmax_weight_flushed, -126.0f)));
  for_floats(s, s.softmax_weight_flushed, std::nextafter(-126.0f, -127.0f), -3e38f, 9973,
             [&](float x, float got) { EXPECT_EQ(got, 0.0f) << x; });
  std::vector<float> in(s.lanes, -std::numeric_limits<float>::infinity()), out(s.lanes);
  in[1] = std::numeric_limits<float>::quiet_NaN();
  in[2] = 128.0f;
  s.softmax_weight_flushed(in.data(), s.lanes, out.data());
  EXPECT_EQ(out[0], 0.0f);
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_EQ(out[2], std::numeric_limits<float>::infinity());
  // Subnormal numbers are back afterwards.
  const volatile float least = std::numeric_limits<float>::min();
  EXPECT_GT(least / 2, 0.0f);
}

TEST_P(Simd, ProductsReachMemoryAsTheyAre) {
  const SimdFunctions& s = *GetParam();
  using Limits = std::numeric_limits<float>;
  for (const float x : {-Limits::infinity(), Limits::infinity(), Limits::lowest(), Limits::max(), Limits::denorm_min(),
                        -Limits::denorm_min(), 0.0f, -0.0f, -1.5f, Limits::quiet_NaN()}) {
    const std::vector<float> in(s.lanes, x);
    std::vector<float> out(s.lanes);
    s.from_products(in.data(), s.lanes, out.data());
    // AVX-512 adds 0 on the way, which makes -0 one, and nothing else.
    const float expected = s.lanes == 16 && x == 0 ? 0.0f : x;
    for (const float got : out) EXPECT_EQ(std::memcmp(&got, &expected, sizeof(x)), 0) << x << " became " << got;
  }
}

// Memory that ends where none can be touched.
class GuardedPage {
 public:
#if defined(_WIN32)
  GuardedPage() {
    // Two pages of addresses, the first of them with memory.
    memory_ = VirtualAlloc(nullptr, 2 * kSize, MEM_RESERVE, PAGE_NOACCESS);
    if (memory_) memory_ = VirtualAlloc(memory_, kSize, MEM_COMMIT, PAGE_READWRITE);
  }
  ~GuardedPage() {
    if (memory_) VirtualFree(memory_, 0, MEM_RELEASE);
  }
#else
  GuardedPage() {
    void* const pages = mmap(nullptr, 2 * kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (pages == MAP_FAILED) return;
    memory_ = pages;
    mprotect(static_cast<char*>(memory_) + kSize, kSize, PROT_NONE);
  }
  ~GuardedPage() {
    if (memory_) munmap(memory_, 2 * kSize);
  }
#endif
  GuardedPage(const GuardedPage&) = delete;
  bool there() const { return memory_ != nullptr; }
  char* last(index_t bytes) const { return static_cast<char*>(memory_) + kSize - bytes; }

 private:
  static constexpr std::size_t kSize = 65536;  // Whole pages, of 4 to 64 KB.
  void* memory_ = nullptr;
};

TEST_P(Simd, FirstElementsAloneAreTouched) {
  const SimdFunctions& s = *GetParam();
  const GuardedPage page;
  ASSERT_TRUE(page.there());
  std::vector<float> in(s.lanes), out(s.lanes);
  for (index_t i = 0; i < s.lanes; ++i) in[i] = 0.5f + float(i);  // Exact in every dtype.
  for (const auto& first : s.first)
    for (index_t n = 0; n <= s.lanes + 1; ++n) {
      const index_t count = std::min(n, s.lanes);
      char* const at = page.last(count * first.size);
      std::memset(at - first.size, 0x5a, std::size_t((count + 1) * first.size));
      const std::string before(at - first.size, std::size_t(first.size));
      first.store(in.data(), n, at);
      EXPECT_EQ(before, std::string(at - first.size, std::size_t(first.size)));
      std::fill(out.begin(), out.end(), -1.0f);
      first.load(at, n, out.data());
      for (index_t i = 0; i < s.lanes; ++i)
        EXPECT_EQ(out[i], i < count ? in[i] : 0.0f)
            << "element " << i << " of " << n << ", of " << first.size << " bytes";
    }
}

TEST_P(Simd, ElementsBehindTheFirstStayAsTheyAre) {
  const SimdFunctions& s = *GetParam();
  const std::vector<float> in(s.lanes, 1.0f);
  for (const auto& first : s.first)
    for (index_t n = 0; n <= s.lanes; ++n) {
      std::vector<unsigned char> out(std::size_t((s.lanes + 1) * first.size), 0xa5);
      first.store(in.data(), n, out.data());
      for (std::size_t i = std::size_t(n * first.size); i < out.size(); ++i)
        EXPECT_EQ(out[i], 0xa5) << i << " of " << n;
    }
}

TEST_P(Simd, EachVectorHasItsSumAndMaximum) {
  const SimdFunctions& s = *GetParam();
  std::vector<float> in(s.lanes * s.lanes), out(s.lanes), expected(s.lanes);
  for (index_t i = 0; i < s.lanes; ++i)
    for (index_t k = 0; k < s.lanes; ++k) {
      in[i * s.lanes + k] = float((i + 1) * 1000 + 37 * k * k % 101);  // Sums are exact.
      expected[i] += in[i * s.lanes + k];
    }
  s.sum_each(in.data(), out.data());
  EXPECT_EQ(out, expected);
  if (!s.max_each) return;
  s.max_each(in.data(), out.data());
  for (index_t i = 0; i < s.lanes; ++i)
    EXPECT_EQ(out[i], *std::max_element(in.begin() + i * s.lanes, in.begin() + (i + 1) * s.lanes));
}

TEST_P(Simd, PairsAreSplitAndPutInOrder) {
  const SimdFunctions& s = *GetParam();
  if (!s.split_pairs) GTEST_SKIP() << s.name << " converts bf16 elements one by one";
  const index_t most = 2 * s.lanes;
  for (index_t n = 0; n <= most; ++n) {
    std::vector<BFloat16> in(n);  // Of n alone, so that ASan sees what is read behind them.
    for (index_t i = 0; i < n; ++i) in[i] = from_float<BFloat16>((i % 3 == 0 ? -1.0f : 1.0f) * (0.5f + float(i)));
    std::vector<float> split(most, -1.0f), ordered(most, -1.0f);
    s.split_pairs(in.data(), n, split.data());
    s.interleave(split.data(), ordered.data());
    for (index_t i = 0; i < most; ++i) {
      const float expected = i < n ? to_float(in[i]) : 0.0f;
      EXPECT_EQ(split[i % 2 * s.lanes + i / 2], expected) << i << " of " << n;
      EXPECT_EQ(ordered[i], expected) << i << " of " << n;
    }
  }
}

TEST_P(Simd, TanhWithinEightRoundings) {
  const SimdFunctions& s = *GetParam();
  for (const auto tanh : s.tanh) {
    if (!tanh) continue;
    for (const bool negative : {false, true}) {
      double worst = 0.0;
      float at = 0.0f;
      for_floats(s, tanh, negative ? -1e-30f : 1e-30f, negative ? -1e30f : 1e30f, stride(), [&](float x, float got) {
        const double error = std::abs(double(got) / std::tanh(double(x)) - 1.0);
        if (!(error <= worst)) worst = error, at = x;
      });
      EXPECT_LE(worst, 8 * std::ldexp(1.0, -24)) << s.name << " at " << at;
    }
    std::vector<float> in(s.lanes, 0.0f), out(s.lanes, 1.0f);
    in[1] = std::numeric_limits<float>::quiet_NaN();
    tanh(in.data(), s.lanes, out.data());
    EXPECT_EQ(out[0], 0.0f);
    EXPECT_TRUE(std::isnan(out[1]));
  }
}

TEST_P(Simd, TanhByExp2WithinItsAbsoluteError) {
  const SimdFunctions& s = *GetParam();
  if (!s.tanh_by_exp2[0]) GTEST_SKIP() << s.name << " has no bf16 products, for which this tanh is";
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto tanh : s.tanh_by_exp2) {
    for (const bool negative : {false, true}) {
      double worst = 0.0;
      float at = 0.0f;
      for_floats(s, tanh, negative ? -0.0f : 0.0f, negative ? -infinity : infinity, stride(), [&](float x, float got) {
        const double error = std::abs(double(got) - std::tanh(double(x) * kTanhFactor));
        if (!(error <= worst)) worst = error, at = x;
      });
      EXPECT_LE(worst, 2.5e-7) << s.name << " at " << at;
    }
    std::vector<float> in(s.lanes, 0.0f), out(s.lanes, 1.0f);
    in[1] = std::numeric_limits<float>::quiet_NaN();
    in[2] = -in[1];
    tanh(in.data(), s.lanes, out.data());
    EXPECT_EQ(out[0], 0.0f);
    EXPECT_TRUE(std::isnan(out[1]));
    EXPECT_TRUE(std::isnan(out[2]));
  }
}

bool bit(const std::uint8_t* bits, index_t n) { return bits[n / 8] >> (n % 8) & 1; }

TEST_P(Simd, DropoutRowsAndColumnsFollowTheDefinition) {
  const SimdFunctions& s = *GetParam();
  const DropoutRule rule = make_dropout(0.2, -5, 77);
  const auto kept = [&](index_t i, index_t j) {
    const PhiloxWords words = rule.bytes(3, 5, i, j / 64, int(j / 4 % 4));
    return rule.keep(words.w[j / 16 % 4] >> (8 * (j % 4)) & 255u);
  };
  std::vector<std::uint8_t> row(512 / 8), columns(64 * 48 / 8);
  s.dropout_row(rule, 3, 5, 1001, 128, 300, row.data());
  for (index_t j = 0; j < 300; ++j) ASSERT_EQ(bit(row.data(), j), kept(1001, 128 + j)) << j;
  s.dropout_columns(rule, 3, 5, 990, 40, 192, columns.data(), 48 / 8);
  for (index_t j = 0; j < 64; ++j)
    for (index_t i = 0; i < 40; ++i)
      ASSERT_EQ(bit(columns.data() + j * 48 / 8, i), kept(990 + i, 192 + j)) << i << " " << j;
}

TEST_P(Simd, DropoutOfARowsOwnQueryAndHeadFollowsTheDefinition) {
  const SimdFunctions& s = *GetParam();
  if (!s.dropout_rows) GTEST_SKIP() << s.name << " has no tiles, whose strips draw so";
  const DropoutRule rule = make_dropout(0.3, 9, -1);
  constexpr index_t kRows = 16, kOfRow = cpu::DropoutRows::kLanesOfRow;
  const auto query = [](index_t t) { return 70 + t / 3; };
  const auto head = [](index_t t) { return 2 + t % 3; };
  std::vector<std::uint64_t> queries(kRows * kOfRow), heads(kRows * kOfRow);
  for (index_t n = 0; n < kRows * kOfRow; ++n)
    queries[n] = std::uint64_t(query(n / kOfRow)), heads[n] = std::uint64_t(head(n / kOfRow));
  std::vector<std::uint8_t> bits(kRows * 8, 0xab);
  const Range drawn{4, 12};
  s.dropout_rows(rule, 3, {queries.data(), heads.data()}, drawn, 448, bits.data());
  for (index_t t = 0; t < kRows; ++t)
    for (index_t j = 0; j < 64; ++j) {
      const PhiloxWords words = rule.bytes(3, head(t), query(t), 7, int(j / 4 % 4));
      const bool is_drawn = drawn.begin <= t && t < drawn.end;
      const bool kept = is_drawn ? rule.keep(words.w[j / 16] >> (8 * (j % 4)) & 255u) : (0xab >> (j % 8) & 1) != 0;
      ASSERT_EQ(bit(bits.data() + 8 * t, j), kept) << t << " " << j;
    }
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, Simd, ::testing::ValuesIn(available()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace flash_attn::testing
