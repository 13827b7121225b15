// Numbers that tiles multiply as sums of bf16.
#include "cpu/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "attention_reference.h"
#include "choices.h"

namespace flash_attn::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Runs a test for each instruction set with tiles.
void with_tiles(const std::function<void()>& test) {
  const Choices restored;
  int sets = 0;
  for (const std::string& isa : cpu_instruction_sets()) {
    if (isa.rfind("amx", 0) != 0) continue;
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    cpu::suppose_core(cpu::Core::other);
    test();
    ++sets;
  }
  if (sets == 0) GTEST_SKIP() << "needs AVX512-BF16, in which tiles are emulated";
}

struct Output {
  Tensor out, lse, dq, dk, dv;
};

// 32 queries of each head, enough for tiles.
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
  AttentionProblem problem(double scale) {
    AttentionProblem p;
    p.q = q.view(), p.k = k.view(), p.v = v.view(), p.softmax_scale = scale;
    return p;
  }
  Output attend(double scale = 1.0) {
    Output o{Tensor({shape.B, shape.Sq, shape.H, shape.Dv}, dtype), Tensor({shape.B, shape.H, shape.Sq}, DType::f32),
             Tensor({shape.B, shape.Sq, shape.H, shape.D}, dtype), Tensor({shape.B, shape.Sk, shape.H, shape.D}, dtype),
             Tensor({shape.B, shape.Sk, shape.H, shape.Dv}, dtype)};
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
  with_tiles([] {
    for (const DType dtype : {DType::f16, DType::f32}) {
      SCOPED_TRACE(to_string(dtype));
      Inputs x({32, 32, 32, 32, 1, 32, 64}, dtype);
      std::mt19937 generator(1);
      for (std::int64_t i = 0; i < x.v.size(); ++i) {
        const float half = to_float(bit_cast<Half>(std::uint16_t(i)));  // Each of them once.
        x.v.set(i, dtype == DType::f32 ? any_number(generator) : std::isfinite(half) ? half : 0.0f);
      }
      if (dtype == DType::f32) x.v.set(0, std::numeric_limits<float>::max()), x.v.set(1, -0x1.fffffep127f);
      const Output o = x.attend();
      std::int64_t others = 0;
      for (std::int64_t i = 0; i < o.out.size(); ++i) {
        const std::int64_t feature = i % 64, head = i / 64 % 32, b = i / (64 * 32 * 32);
        others += o.out.get(i) != x.v.get((b * 32 + head) * 64 + feature);
      }
      EXPECT_EQ(others, 0);
    }
  });
}

// The LSE of one key is its score.
TEST(CpuTiles, AScoreHasAllProductsThatShow) {
  with_tiles([] {
    for (const DType dtype : {DType::f16, DType::f32}) {
      SCOPED_TRACE(to_string(dtype));
      Inputs x({1, 64, 64, 32, 1, 40, 32}, dtype);
      std::mt19937 generator(2);
      std::uniform_real_distribution<double> uniform(-8.0, 8.0);
      for (std::int64_t h = 0; h < 64; ++h) {
        x.k.set(h * 40 + h % 40, uniform(generator));
        for (std::int64_t i = 0; i < 32; ++i) x.q.set((i * 64 + h) * 40 + h % 40, uniform(generator));
      }
      const Output o = x.attend();
      double worst = 0.0;
      for (std::int64_t h = 0; h < 64; ++h)
        for (std::int64_t i = 0; i < 32; ++i) {
          const double score = x.q.get((i * 64 + h) * 40 + h % 40) * x.k.get(h * 40 + h % 40);
          worst = std::max(worst, std::abs(o.lse.get(h * 32 + i) - score) / std::max(1.0, std::abs(score)));
        }
      EXPECT_LE(worst, 2e-7);  // Roundings to log2 units and back.
    }
  });
}

TEST(CpuTiles, AnInfiniteValueDoesNotBecomeFinite) {
  with_tiles([] {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      Inputs x({1, 1, 1, 32, 40, 32, 32}, dtype);
      x.v.set(5 * 32 + 3, kInfinity);
      const Output o = x.attend();
      for (std::int64_t i = 0; i < 32; ++i) {
        EXPECT_FALSE(std::isfinite(o.out.get(i * 32 + 3))) << to_string(dtype);
        EXPECT_EQ(o.out.get(i * 32 + 4), 0.0) << to_string(dtype);
      }
    }
  });
}

TEST(CpuTiles, AreNotForFp32WhereVectorsAreFaster) {
  const Choices restored;
  const auto set = [](cpu::Core core, DType dtype, std::int64_t D) {
    cpu::suppose_core(core);
    return explain(Inputs({1, 1, 1, 128, 128, D, D}, dtype).problem(1.0), Pass::forward).instruction_set;
  };
  with_tiles([&] {
    const std::string tiles = set(cpu::Core::other, DType::bf16, 64);
    const bool emulated = tiles != "amx_bf16";
    EXPECT_EQ(set(cpu::Core::other, DType::f32, 64), tiles);
    EXPECT_EQ(set(cpu::Core::other, DType::f32, 17), tiles);
    EXPECT_EQ(set(cpu::Core::other, DType::f32, 16), "avx512");
    EXPECT_EQ(set(cpu::Core::golden_cove, DType::f32, 64), emulated ? tiles : "avx512");
    for (const DType dtype : {DType::bf16, DType::f16}) EXPECT_EQ(set(cpu::Core::golden_cove, dtype, 16), tiles);
  });
}

TEST(CpuTiles, AreEmulatedToTheBit) {
  const Choices restored;
  const auto sets = cpu_instruction_sets();
  if (std::find(sets.begin(), sets.end(), "amx_bf16") == sets.end()) GTEST_SKIP() << "needs AMX-BF16";
  cpu::suppose_core(cpu::Core::other);
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    SCOPED_TRACE(to_string(dtype));
    Inputs x({1, 2, 2, 150, 333, 80, 40}, dtype);
    std::mt19937 generator(4);
    for (Tensor* t : {&x.q, &x.k, &x.v})
      for (std::int64_t i = 0; i < t->size(); ++i) t->set(i, std::normal_distribution<double>()(generator));
    const Tensor dout = Tensor::random({1, 150, 2, 40}, dtype, generator);
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
