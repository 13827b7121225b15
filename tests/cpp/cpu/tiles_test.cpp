// Numbers that tiles multiply as sums of bf16.
#include "cpu/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention_reference.h"
#include "choices.h"

namespace flash_attn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr std::int64_t kQueries = 96, kKeys = 64;  // Of each head: enough for tiles, also of fp32.

// Runs a test for each instruction set with tiles and each dtype, which are to be multiplied there.
void with_tiles(const std::vector<DType>& dtypes, const std::function<void(DType)>& test) {
  const Choices restored;
  int sets = 0;
  for (const std::string& isa : cpu_instruction_sets()) {
    if (isa.rfind("amx", 0) != 0) continue;
    ++sets;
    for (const DType dtype : dtypes) {
      SCOPED_TRACE(isa + ", " + to_string(dtype));
      force_cpu_instruction_set(isa);
      cpu::suppose_core(cpu::Core::other);
      test(dtype);
    }
  }
  if (sets == 0) GTEST_SKIP() << "needs AVX512-BF16, in which tiles are emulated";
}

struct Output {
  Tensor out, lse, dq, dk, dv;
};

struct Inputs {
  Shape shape;
  DType dtype;
  Tensor q, k, v;

  Inputs(const Shape& of, DType type)
      : shape(of),
        dtype(type),
        q({of.B, of.Sq, of.H, of.D}, type),
        k({of.B, of.Sk, of.H, of.D}, type),
        v({of.B, of.Sk, of.H, of.Dv}, type) {
    for (Tensor* x : {&q, &k, &v})
      for (std::int64_t i = 0; i < x->size(); ++i) x->set(i, 0.0);
  }
  std::int64_t key(std::int64_t b, std::int64_t n, std::int64_t h) const { return (b * shape.Sk + n) * shape.H + h; }
  // All weight on the first key of each head, by a feature of its queries and of the other keys.
  void see_one_key(std::int64_t feature_of_first_head) {
    for (std::int64_t h = 0; h < shape.H; ++h) {
      const std::int64_t feature = (feature_of_first_head + h) % shape.D;
      for (std::int64_t row = 0; row < shape.B * shape.Sq; ++row) q.set((row * shape.H + h) * shape.D + feature, 1.0);
      for (std::int64_t b = 0; b < shape.B; ++b)
        for (std::int64_t n = 1; n < shape.Sk; ++n) k.set(key(b, n, h) * shape.D + feature, -1e4);
    }
  }
  AttentionProblem problem(double scale) {
    AttentionProblem p;
    p.q = q.view(), p.k = k.view(), p.v = v.view(), p.softmax_scale = scale;
    return p;
  }
  Output attend(double scale = 1.0) {
    Output o{Tensor({shape.B, shape.Sq, shape.H, shape.Dv}, dtype), Tensor({shape.B, shape.H, shape.Sq}, DType::f32),
             Tensor({shape.B, shape.Sq, shape.H, shape.D}, dtype), Tensor({shape.B, shape.Sk, shape.H, shape.D}, dtype),
             Tensor({shape.B, shape.Sk, shape.H, shape.Dv}, dtype)};
    EXPECT_EQ(explain(problem(scale), Pass::forward).instruction_set.rfind("amx", 0), 0u);
    ForwardArgs f;
    f.problem = problem(scale), f.out = o.out.view(), f.lse = o.lse.view();
    attention_forward(f, default_executor(1));
    return o;
  }
  void differentiate(Output& o, Tensor dout, double scale) {
    Tensor softmax_d({shape.B, shape.H, shape.Sq}, DType::f32);
    BackwardArgs b;
    b.problem = problem(scale), b.dout = dout.view(), b.out = o.out.view(), b.lse = o.lse.view();
    b.dq = o.dq.view(), b.dk = o.dk.view(), b.dv = o.dv.view(), b.softmax_d = softmax_d.view();
    attention_backward(b, default_executor(1));
  }
};

// Any finite number whose parts are all bf16's normal numbers.
float any_number(std::mt19937& generator) {
  const float x = bit_cast<float>(std::uint32_t(generator()));
  return std::isfinite(x) && std::abs(x) >= 0x1p-100f ? x : 1.0f;
}

// The output of one key is its value, so all of the value's parts have to be there.
TEST(CpuTiles, AValueIsAllOfItsParts) {
  with_tiles({DType::f16, DType::f32}, [](DType dtype) {
    constexpr std::int64_t kHeads = 32, kFeatures = 64;
    Inputs x({32, kHeads, kHeads, kQueries, kKeys, 32, kFeatures}, dtype);
    x.see_one_key(0);
    const auto value_of = [&](std::int64_t b, std::int64_t in_row) { return x.key(b, 0, 0) * kFeatures + in_row; };
    std::mt19937 generator(1);
    for (std::int64_t i = 0; i < 1 << 16; ++i) {
      const float half = to_float(bit_cast<Half>(std::uint16_t(i)));  // Each of them once.
      const float value = dtype == DType::f32 ? any_number(generator) : std::isfinite(half) ? half : 0.0f;
      x.v.set(value_of(i / (kHeads * kFeatures), i % (kHeads * kFeatures)), value);
    }
    if (dtype == DType::f32) x.v.set(0, std::numeric_limits<float>::max()), x.v.set(1, -0x1.fffffep127f);
    const Output o = x.attend();
    std::int64_t others = 0;
    for (std::int64_t i = 0; i < o.out.size(); ++i) {
      const std::int64_t in_row = i % (kHeads * kFeatures), b = i / (kHeads * kFeatures * kQueries);
      others += o.out.get(i) != x.v.get(value_of(b, in_row));
    }
    EXPECT_EQ(others, 0);
  });
}

// The LSE of one key is its score.
TEST(CpuTiles, AScoreHasAllProductsThatShow) {
  with_tiles({DType::f16, DType::f32}, [](DType dtype) {
    constexpr std::int64_t kHeads = 64, kFeatures = 40;
    Inputs x({1, kHeads, kHeads, kQueries, kKeys, kFeatures, 32}, dtype);
    x.see_one_key(1);
    std::mt19937 generator(2);
    std::uniform_real_distribution<double> uniform(-8.0, 8.0);
    const auto feature_of = [](std::int64_t row, std::int64_t h) {
      return (row * kHeads + h) * kFeatures + h % kFeatures;
    };
    for (std::int64_t h = 0; h < kHeads; ++h) {
      x.k.set(feature_of(0, h), uniform(generator));
      for (std::int64_t i = 0; i < kQueries; ++i) x.q.set(feature_of(i, h), uniform(generator));
    }
    const Output o = x.attend();
    double worst = 0.0;
    for (std::int64_t h = 0; h < kHeads; ++h)
      for (std::int64_t i = 0; i < kQueries; ++i) {
        const double score = x.q.get(feature_of(i, h)) * x.k.get(feature_of(0, h));
        worst = std::max(worst, std::abs(o.lse.get(h * kQueries + i) - score) / std::max(1.0, std::abs(score)));
      }
    EXPECT_LE(worst, 2e-7);  // Roundings to log2 units and back.
  });
}

TEST(CpuTiles, AnInfiniteValueDoesNotBecomeFinite) {
  with_tiles({DType::bf16, DType::f16, DType::f32}, [](DType dtype) {
    Inputs x({1, 1, 1, kQueries, kKeys + 9, 32, 32}, dtype);
    x.v.set(5 * 32 + 3, kInfinity);
    const Output o = x.attend();
    for (std::int64_t i = 0; i < kQueries; ++i) {
      EXPECT_FALSE(std::isfinite(o.out.get(i * 32 + 3)));
      EXPECT_EQ(o.out.get(i * 32 + 4), 0.0);
    }
  });
}

TEST(CpuTiles, AreNotForFp32WhereVectorsAreFaster) {
  with_tiles({DType::bf16, DType::f16, DType::f32}, [](DType dtype) {
    const auto tiled = [dtype](cpu::Core core, std::int64_t D) {
      cpu::suppose_core(core);
      Inputs x({1, 1, 1, kQueries, 128, D, D}, dtype);
      return explain(x.problem(1.0), Pass::forward).instruction_set.rfind("amx", 0) == 0;
    };
    const bool always = dtype != DType::f32;
    Inputs bf16({1, 1, 1, kQueries, 128, 64, 64}, DType::bf16);
    const bool emulated = explain(bf16.problem(1.0), Pass::forward).instruction_set == "amx_bf16_emulated";
    EXPECT_TRUE(tiled(cpu::Core::other, 17));
    EXPECT_EQ(tiled(cpu::Core::other, 16), always);
    EXPECT_EQ(tiled(cpu::Core::golden_cove, 64), always || emulated);
  });
}

TEST(CpuTiles, AreForEnoughKeys) {
  with_tiles({DType::bf16, DType::f16, DType::f32}, [](DType dtype) {
    const std::int64_t keys = dtype == DType::bf16 ? 1 : dtype == DType::f16 ? 17 : 64;
    const std::int64_t length = dtype == DType::bf16 ? 1 : dtype == DType::f16 ? 9 : 64;
    const std::int64_t rows = dtype == DType::bf16 ? 13 : dtype == DType::f16 ? 25 : 64;  // fewer meet K and V in place
    const auto tiled = [dtype](Pass pass, std::int64_t queries, std::int64_t keys_of_head) {
      Inputs x({1, 1, 1, queries, keys_of_head, 64, 64}, dtype);
      return explain(x.problem(1.0), pass).instruction_set.rfind("amx", 0) == 0;
    };
    EXPECT_TRUE(tiled(Pass::forward, kQueries, keys));
    EXPECT_EQ(tiled(Pass::forward, kQueries, std::max<std::int64_t>(1, keys - 1)), keys == 1);
    EXPECT_TRUE(tiled(Pass::backward, kQueries, length));
    EXPECT_EQ(tiled(Pass::backward, kQueries, std::max<std::int64_t>(1, length - 1)), length == 1);
    EXPECT_TRUE(tiled(Pass::backward, rows, kQueries));
    EXPECT_FALSE(tiled(Pass::backward, rows - 1, kQueries));
    EXPECT_FALSE(tiled(Pass::backward, 16, 16));
  });
}

TEST(CpuTiles, AreEmulatedToTheBit) {
  const Choices restored;
  const auto sets = cpu_instruction_sets();
  if (std::find(sets.begin(), sets.end(), "amx_bf16") == sets.end()) GTEST_SKIP() << "needs AMX-BF16";
  cpu::suppose_core(cpu::Core::other);
  const std::pair<DType, std::int64_t> kinds[] = {
      {DType::bf16, 150}, {DType::f16, 150}, {DType::f32, 150}, {DType::bf16, 6}, {DType::bf16, 20}};
  for (const auto& [dtype, queries] : kinds) {
    SCOPED_TRACE(std::string(to_string(dtype)) + ", " + std::to_string(queries) + " queries");
    Inputs x({1, 2, 2, queries, 333, 80, 40}, dtype);
    std::mt19937 generator(4);
    for (Tensor* t : {&x.q, &x.k, &x.v})
      for (std::int64_t i = 0; i < t->size(); ++i) t->set(i, std::normal_distribution<double>()(generator));
    const Tensor dout = Tensor::random({1, queries, 2, 40}, dtype, generator);
    Output of[2];
    for (int emulated = 0; emulated < 2; ++emulated) {
      force_cpu_instruction_set(emulated ? "amx_bf16_emulated" : "amx_bf16");
      of[emulated] = x.attend(0.1);
      x.differentiate(of[emulated], dout, 0.1);
    }
    for (Tensor Output::* t : {&Output::out, &Output::lse, &Output::dq, &Output::dk, &Output::dv})
      EXPECT_EQ((of[0].*t).bytes(), (of[1].*t).bytes());
  }
}

}  // namespace
}  // namespace flash_attn::testing
