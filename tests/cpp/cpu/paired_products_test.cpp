// Scores whose features are multiplied in pairs.
#include "cpu/paired_products.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "attention_reference.h"
#include "choices.h"

namespace flash_attn::testing {
namespace {

struct Output {
  Tensor out, lse;
  bool operator==(const Output& other) const {
    return out.bytes() == other.out.bytes() && lse.bytes() == other.lse.bytes();
  }
};

// Forward in fp16, of queries and keys that a test may change.
struct Inputs {
  Shape shape;
  Features features;
  Tensor q, k, v;
  double scale;

  explicit Inputs(const Shape& of, const Features& f = {}, double length = 1.0)
      : shape(of), features(f), scale(1 / std::sqrt(double(of.D))) {
    std::mt19937 generator(5);
    q = Tensor::random({of.B, of.Sq, of.H, of.D}, DType::f16, generator, length);
    k = Tensor::random({of.B, of.Sk, of.Hk, of.D}, DType::f16, generator, length);
    v = Tensor::random({of.B, of.Sk, of.Hk, of.Dv}, DType::f16, generator);
  }
  AttentionProblem problem() {
    AttentionProblem p;
    p.q = q.view(), p.k = k.view(), p.v = v.view();
    p.softmax_scale = scale, p.softcap = features.softcap, p.causal = features.causal;
    p.window_left = features.window_left, p.window_right = features.window_right;
    return p;
  }
  Output attend(cpu::Core core, int threads = 1) {
    cpu::suppose_core(core);
    Output o{Tensor({shape.B, shape.Sq, shape.H, shape.Dv}, DType::f16),
             Tensor({shape.B, shape.H, shape.Sq}, DType::f32)};
    ForwardArgs f;
    f.problem = problem(), f.out = o.out.view(), f.lse = o.lse.view();
    attention_forward(f, default_executor(threads));
    return o;
  }
  Reference reference() const {
    const Problem64 p{shape, features, scale, nullptr, DropoutRule{}};
    std::mt19937 generator(9);
    return p.run(q, k, v, Tensor::random({shape.B, shape.Sq, shape.H, shape.Dv}, DType::f16, generator));
  }
  bool says_pairs() {
    for (const std::string& reason : explain(problem(), Pass::forward).reasons)
      if (reason.find("in pairs") != std::string::npos) return true;
    return false;
  }
};

constexpr cpu::Core kPairs = cpu::Core::zen4, kPlain = cpu::Core::other;

Features window(std::int64_t left, std::int64_t right) {
  Features f;
  f.window_left = left, f.window_right = right;
  return f;
}
Features causal() {
  Features f;
  f.causal = true;
  return f;
}

// Runs a test for each instruction set that has such kernels.
void with_pairs(const std::function<void()>& test) {
  const Choices restored;
  int sets = 0;
  for (const std::string& isa : cpu_instruction_sets()) {
    if (!multiplies_in_vectors_of_16(isa)) continue;
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    test();
    ++sets;
  }
  if (sets == 0) GTEST_SKIP() << "needs AVX-512";
}

double most_difference(const Tensor& got, const std::vector<double>& expected) {
  double most = 0.0;
  for (std::int64_t i = 0; i < got.size(); ++i) most = std::max(most, std::abs(got.get(i) - expected[i]));
  return most;
}

// As exact as plain products; that they are others shows in the last bits of the LSE.
TEST(CpuPairs, AreAsExactAsPlainProducts) {
  with_pairs([] {
    for (const std::int64_t D : {128, 64, 22, 97})
      for (const double length : {1.0, 2.5}) {
        SCOPED_TRACE("D=" + std::to_string(D) + ", of length " + std::to_string(length));
        Inputs x({1, 1, 1, 132, 400, D, 64}, {}, length);
        const Reference expected = x.reference();
        const Output plain = x.attend(kPlain), pairs = x.attend(kPairs);
        EXPECT_FALSE(plain == pairs);
        EXPECT_LE(relative_error(pairs.out, expected.out), tolerance(DType::f16));
        EXPECT_LE(most_difference(pairs.lse, expected.lse), 1.5 * most_difference(plain.lse, expected.lse) + 1e-6);
      }
  });
}

// Long keys that meet short queries are the worst case of those that are taken: where the limit is.
TEST(CpuPairs, AreAsExactAsFp16AtTheLimit) {
  with_pairs([] {
    Inputs x({1, 1, 1, 132, 400, 128, 64});
    for (std::int64_t i = 0; i < x.q.size(); ++i) x.q.set(i, 0.05 * x.q.get(i));
    for (std::int64_t i = 0; i < x.k.size(); ++i) x.k.set(i, 4.65 + 0.1 * x.k.get(i));  // 64 of their squares: 1384.
    const Reference expected = x.reference();
    const Output pairs = x.attend(kPairs);
    EXPECT_FALSE(pairs == x.attend(kPlain));
    EXPECT_LE(most_difference(pairs.lse, expected.lse), 5e-6);
    EXPECT_LE(relative_error(pairs.out, expected.out), 2e-3);
  });
}

// Bits say whether pairs were taken: rows that saw what is too long for them have those of plain products.
TEST(CpuPairs, LeaveOutWhatIsTooLong) {
  with_pairs([] {
    const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
    for (const double value : {100.0, -100.0, infinity, -infinity, nan}) {
      SCOPED_TRACE(value);
      Inputs x({1, 1, 1, 512, 512, 64, 64}, causal());
      const auto is_plain = [&](std::int64_t first, std::int64_t last) {
        const Output pairs = x.attend(kPairs), plain = x.attend(kPlain);
        bool same = true;
        for (std::int64_t i = first; i < last; ++i)
          same = same && (pairs.lse.get(i) == plain.lse.get(i) || std::isnan(plain.lse.get(i)));
        for (std::int64_t i = first * 64; i < last * 64; ++i)
          same = same && (pairs.out.get(i) == plain.out.get(i) || std::isnan(plain.out.get(i)));
        return same;
      };
      EXPECT_FALSE(is_plain(0, 512));
      x.k.set(301 * 64 + 9, value);  // The second of a pair.
      if (std::isnan(value)) {       // Which makes scores of this key what it is, and no others.
        const Output pairs = x.attend(kPairs);
        for (std::int64_t i = 0; i < 512; ++i) EXPECT_EQ(std::isnan(pairs.lse.get(i)), i >= 301) << i;
      } else {
        EXPECT_TRUE(is_plain(304, 512));
      }
      EXPECT_FALSE(is_plain(0, 304));
      x = Inputs(x.shape, x.features);
      x.q.set(301 * 64 + 4, value);
      EXPECT_TRUE(is_plain(288, 304));
      EXPECT_FALSE(is_plain(0, 288));
      EXPECT_FALSE(is_plain(304, 512));
    }
    Inputs steep({1, 1, 1, 512, 512, 64, 64});
    steep.scale = 4;
    EXPECT_TRUE(steep.attend(kPairs) == steep.attend(kPlain));
    steep.scale = -4;
    EXPECT_TRUE(steep.attend(kPairs) == steep.attend(kPlain));
  });
}

// However queries are cut into blocks and wherever packed keys turn.
TEST(CpuPairs, DoNotDependOnThreads) {
  with_pairs([] {
    const std::int64_t keys[] = {2064, 1999, 640};
    for (const std::int64_t n : keys)
      for (const Features& f : {Features{}, causal(), window(300, 0), window(200, 90), window(64, 32)}) {
        SCOPED_TRACE(std::to_string(n) + " keys, window " + std::to_string(f.window_left));
        for (const double length : {1.0, 3.0}) {  // Of 3, some strips are over the limit.
          Inputs x({1, 1, 1, n, n, 64, 64}, f, length);
          const Output one = x.attend(kPairs, 1);
          EXPECT_FALSE(one == x.attend(kPlain, 1));
          for (const int threads : {2, 5, 16}) EXPECT_TRUE(one == x.attend(kPairs, threads)) << threads;
        }
      }
  });
}

// Nor on what lay in the memory of a block's rows that has not as many: those of a head before.
TEST(CpuPairs, DoNotDependOnOtherHeads) {
  with_pairs([] {
    Inputs x({1, 2, 2, 140, 400, 64, 64}, {}, 2.0);
    const Output before = x.attend(kPairs);
    for (std::int64_t i = 12; i < 16; ++i)
      for (std::int64_t d = 0; d < 64; ++d) x.q.set(i * 2 * 64 + d, 50.0);  // Of the first head.
    const Output after = x.attend(kPairs), plain = x.attend(kPlain);
    bool same_as_plain = true;
    for (std::int64_t i = 140 + 128; i < 140 + 140; ++i) {
      EXPECT_EQ(after.lse.get(i), before.lse.get(i));
      same_as_plain = same_as_plain && after.lse.get(i) == plain.lse.get(i);
    }
    EXPECT_FALSE(same_as_plain);
  });
}

TEST(CpuPairs, AreExplained) {
  const Choices restored;
  const auto says = [](const Shape& shape, const Features& f = {}) { return Inputs(shape, f).says_pairs(); };
  for (const std::string& isa : cpu_instruction_sets()) {
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    const bool there = multiplies_in_vectors_of_16(isa);
    cpu::suppose_core(kPairs);
    EXPECT_EQ(says({1, 1, 1, 512, 512, 128, 128}), there);
    EXPECT_EQ(says({1, 1, 1, 512, 512, 64, 64}, causal()), there);
    EXPECT_FALSE(says({1, 1, 1, 512, 512, 136, 128}));               // More than one sum.
    EXPECT_FALSE(says({1, 1, 1, 8, 512, 64, 64}));                   // Few rows.
    EXPECT_FALSE(says({1, 1, 1, 512, 512, 32, 32}, window(64, 0)));  // In the lanes.
    for (const cpu::Core core : {cpu::Core::zen5, kPlain}) {
      cpu::suppose_core(core);
      EXPECT_FALSE(says({1, 1, 1, 512, 512, 128, 128}));
    }
  }
}

TEST(CpuPairs, AreSummedOnce) {
  using Target = cpu::Portable32;
  constexpr std::int64_t W = Target::Simd::W, kFeatures = 10, kRows = 2 * W;  // Features 8 and 9 are in no pair.
  std::vector<float> rows(kRows * kFeatures), memory(std::size_t(cpu::PairSums<Target>::elems(kRows)), -1.0f);
  for (std::int64_t r = 0; r < kRows; ++r)
    for (std::int64_t d = 0; d < kFeatures; ++d) rows[r * kFeatures + d] = float(r % 5 + d);
  const auto sums = cpu::PairSums<Target>::at(memory.data(), kRows);
  sums.sum_rows(rows.data(), kFeatures, kRows, kFeatures);
  float most[2] = {0, 0};
  for (std::int64_t r = 0; r < kRows; ++r) {
    const float* const x = rows.data() + r * kFeatures;
    EXPECT_EQ(sums.products[r], x[0] * x[1] + x[4] * x[5]);
    most[r / W] = std::max(most[r / W], x[0] * x[0] + x[1] * x[1] + x[4] * x[4] + x[5] * x[5]);
  }
  EXPECT_EQ(sums.squares[0], most[0]);
  EXPECT_EQ(sums.squares[1], most[1]);
  EXPECT_EQ(sums.most_squares({0, kRows}), std::max(most[0], most[1]));
  EXPECT_EQ(sums.most_squares({W, kRows}), most[1]);
  rows[W * kFeatures + 1] = std::numeric_limits<float>::quiet_NaN();
  sums.sum_rows(rows.data(), kFeatures, kRows, kFeatures);
  EXPECT_EQ(sums.squares[0], most[0]);
  EXPECT_EQ(sums.squares[1], std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace flash_attn::testing
