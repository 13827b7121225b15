// The CPU backend against double precision: every instruction set that this machine has, every dtype and feature.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention_reference.h"
#include "choices.h"

namespace flash_attn::testing {
namespace {

struct Case {
  const char* name;
  Shape shape;
  Features features;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

struct Attention {
  Tensor q, k, v, dout, out, lse, dq, dk, dv, softmax_d;
  std::vector<float> slopes;
  std::vector<std::int64_t> rng{1234567890123, 42};
  AttentionProblem problem;

  Attention(const Case& c, DType dtype) {
    const Shape& s = c.shape;
    std::mt19937 generator(7);
    q = Tensor::random({s.B, s.Sq, s.H, s.D}, dtype, generator);
    k = Tensor::random({s.B, s.Sk, s.Hk, s.D}, dtype, generator);
    v = Tensor::random({s.B, s.Sk, s.Hk, s.Dv}, dtype, generator);
    dout = Tensor::random({s.B, s.Sq, s.H, s.Dv}, dtype, generator);
    const DType lse_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
    out = Tensor({s.B, s.Sq, s.H, s.Dv}, dtype);
    lse = Tensor({s.B, s.H, s.Sq}, lse_dtype);
    softmax_d = Tensor({s.B, s.H, s.Sq}, lse_dtype);
    dq = Tensor({s.B, s.Sq, s.H, s.D}, dtype);
    dk = Tensor({s.B, s.Sk, s.Hk, s.D}, dtype);
    dv = Tensor({s.B, s.Sk, s.Hk, s.Dv}, dtype);
    problem.q = q.view();
    problem.k = k.view();
    problem.v = v.view();
    problem.softmax_scale = 1.0 / std::sqrt(double(s.D));
    problem.softcap = c.features.softcap;
    problem.causal = c.features.causal;
    problem.window_left = c.features.window_left;
    problem.window_right = c.features.window_right;
    problem.dropout_p = c.features.dropout_p;
    if (c.features.dropout_p > 0) problem.rng_state = vector_view(rng.data(), DType::i64, 2);
    if (c.features.alibi) {
      for (std::int64_t h = 0; h < s.H; ++h) slopes.push_back(std::exp2(-float(h + 1)));
      problem.alibi_slopes = vector_view(slopes.data(), DType::f32, s.H);
    }
  }
  static TensorView vector_view(void* data, DType dtype, std::int64_t n) {
    TensorView v;
    v.data = data;
    v.dtype = dtype;
    v.ndim = 1;
    v.sizes[0] = n;
    v.strides[0] = 1;
    return v;
  }
  void forward(const Executor& executor) {
    ForwardArgs f;
    f.problem = problem;
    f.out = out.view();
    f.lse = lse.view();
    attention_forward(f, executor);
  }
  void backward(const Executor& executor, const TensorView& dlse = {}) {
    BackwardArgs b;
    b.problem = problem;
    b.dout = dout.view();
    b.out = out.view();
    b.lse = lse.view();
    b.dq = dq.view();
    b.dk = dk.view();
    b.dv = dv.view();
    b.softmax_d = softmax_d.view();
    b.dlse = dlse;
    attention_backward(b, executor);
  }
  void run(const Executor& executor) { forward(executor), backward(executor); }
  Reference reference(const Case& c, std::vector<char> keep = {}) const {
    Problem64 p{c.shape, c.features, problem.softmax_scale, slopes.empty() ? nullptr : &slopes,
                make_dropout(c.features.dropout_p, rng[0], rng[1])};
    p.keep = std::move(keep);
    return p.run(q, k, v, dout);
  }
};

Features with(bool causal, std::int64_t left, std::int64_t right, double softcap, bool alibi, double dropout) {
  return {causal, left, right, softcap, alibi, dropout};
}

const Case kCases[] = {
    {"plain", {2, 2, 2, 70, 150, 32, 32}, {}},
    {"causal", {1, 1, 1, 200, 1100, 64, 64}, with(true, -1, -1, 0, false, 0)},
    {"causal_more_queries", {1, 2, 1, 150, 70, 40, 40}, with(true, -1, -1, 0, false, 0)},
    {"causal_long", {1, 1, 1, 140, 1300, 16, 16}, with(true, -1, -1, 0, false, 0)},
    {"window", {1, 2, 2, 257, 301, 24, 24}, with(false, 33, 17, 0, false, 0)},
    {"window_far_along", {1, 2, 1, 300, 1490, 16, 16}, with(false, 50, 3, 0, false, 0)},
    {"window_of_two_blocks", {1, 1, 1, 290, 1500, 16, 16}, with(false, 1100, 20, 0, false, 0)},
    {"window_around_packed_keys", {1, 2, 2, 300, 1400, 40, 24}, with(false, 400, 30, 0, false, 0)},
    {"few_queries_and_keys", {2, 2, 2, 62, 100, 48, 40}, with(true, -1, -1, 0, false, 0)},
    {"window_of_whole_vectors", {1, 2, 1, 330, 330, 64, 40}, with(false, 64, 0, 0, false, 0)},
    {"window_of_whole_vectors_around_packed_keys", {1, 1, 1, 900, 900, 24, 72}, with(false, 320, 64, 0, false, 0)},
    {"window_of_one_key", {1, 1, 1, 190, 190, 32, 32}, with(false, 0, 0, 0, false, 0)},
    {"window_past_end", {1, 1, 1, 120, 40, 8, 8}, with(false, 5, 3, 0, false, 0)},
    {"softcap", {1, 2, 2, 65, 130, 59, 59}, with(true, -1, -1, 3.0, false, 0)},
    {"alibi", {2, 3, 1, 66, 140, 32, 32}, with(false, -1, -1, 0, true, 0)},
    {"dropout", {2, 3, 1, 130, 333, 32, 32}, with(true, -1, -1, 0, false, 0.3)},
    {"alibi_and_dropout", {1, 3, 1, 150, 260, 48, 48}, with(false, -1, -1, 0, true, 0.4)},
    {"window_and_dropout", {2, 2, 1, 275, 333, 32, 64}, with(false, 40, 100, 0, false, 0.1)},
    {"everything", {1, 6, 2, 140, 270, 96, 48}, with(true, 100, -1, 5.0, true, 0)},
    {"odd_head_dims", {1, 2, 2, 33, 65, 111, 7}, {}},
    {"one_by_one", {1, 1, 1, 1, 1, 1, 1}, {}},
    {"large_head_dims", {1, 2, 1, 20, 150, 576, 512}, with(true, -1, -1, 0, false, 0)},
    {"few_keys", {1, 4, 1, 1200, 60, 40, 40}, {}},
    {"few_keys_in_a_window", {1, 2, 1, 700, 300, 64, 48}, with(false, 100, 40, 0, false, 0)},
    // Six for five threads. Heads share keys, or not every kernel would share the last one (BackwardPlan::shares_rest).
    {"one_unit_left_over", {2, 6, 3, 530, 530, 8, 8}, with(true, -1, -1, 0, false, 0)},
    // Just too few keys, or too short, for tiles: of fp32, then of fp16.
    {"one_key_short_of_tiles", {1, 2, 2, 70, 63, 32, 32}, {}},
    {"one_key_short_of_tiles_of_fp16", {1, 2, 2, 70, 16, 32, 32}, {}},
    {"too_short_for_tiles_of_fp16", {1, 2, 2, 70, 8, 32, 32}, {}},
    // Backward meets few queries that see all keys alike in other ways than those of which one sees a key less.
    {"few_queries_alike", {2, 6, 2, 5, 70, 24, 16}, {}},
    {"few_queries_of_fewer_keys", {1, 4, 2, 5, 4, 16, 16}, {}},
    {"few_queries_but_for_the_first_key", {1, 4, 2, 3, 70, 16, 16}, with(false, 68, -1, 0, false, 0)},
    {"few_queries_but_for_the_last_key", {1, 2, 2, 3, 70, 16, 16}, with(false, -1, 1, 0, false, 0)},
    {"few_queries_with_dropout", {1, 4, 2, 5, 70, 16, 16}, with(false, -1, -1, 0, false, 0.3)},
    {"few_queries", {1, 2, 1, 3, 900, 32, 32}, with(true, -1, -1, 0, false, 0)},
    {"rows_of_two_blocks", {1, 1, 1, 40, 400, 24, 24}, with(true, -1, -1, 0, false, 0)},
    {"no_keys", {1, 2, 2, 5, 0, 16, 16}, {}},
    {"no_queries", {1, 2, 2, 0, 5, 16, 16}, {}},
};

// Every instruction set against one reference.
class CpuAttention : public ::testing::TestWithParam<std::tuple<DType, Case>> {
  const Choices restored_;
};

void expect_outputs(const Attention& run, const Reference& expected, DType dtype) {
  EXPECT_LE(relative_error(run.out, expected.out), tolerance(dtype));
  EXPECT_LE(relative_error(run.lse, expected.lse), dtype == DType::f64 ? 1e-12 : 1e-6);
}

// By one thread and by five, whose results are the same bits.
TEST_P(CpuAttention, MatchesDoublePrecisionByAnyThreads) {
  const auto& [dtype, c] = GetParam();
  const Reference expected = Attention(c, dtype).reference(c);
  const double bound = tolerance(dtype);
  for (const std::string& isa : instruction_sets_that_differ(dtype)) {
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    for (const cpu::Core core : cores_that_differ(isa, dtype)) {
      SCOPED_TRACE(way_of(core));
      cpu::suppose_core(core);
      Attention one(c, dtype), many(c, dtype);
      one.run(default_executor(1));
      expect_outputs(one, expected, dtype);
      EXPECT_LE(relative_error(one.dq, expected.dq), bound);
      EXPECT_LE(relative_error(one.dk, expected.dk), bound);
      EXPECT_LE(relative_error(one.dv, expected.dv), bound);
      many.run(default_executor(5));
      EXPECT_EQ(one.out.bytes(), many.out.bytes());
      EXPECT_EQ(one.lse.bytes(), many.lse.bytes());
      EXPECT_EQ(one.dq.bytes(), many.dq.bytes());
      EXPECT_EQ(one.dk.bytes(), many.dk.bytes());
      EXPECT_EQ(one.dv.bytes(), many.dv.bytes());
    }
  }
}

// Query heads that meet the rows of one key head where they are: strips of one, two, up to four and more rows, with all
// that is left of vectors, pairs of them, turns of keys and tiles, whose strips are one half or two.
TEST(CpuFewRows, OfEveryCountMatchDoublePrecision) {
  const Choices restored;
  std::vector<Case> cases;
  for (const std::int64_t heads : {1, 2, 3, 4, 6, 7, 16, 17, 32})
    for (const auto& [D, Dv] : {std::pair(36, 20), std::pair(64, 64), std::pair(17, 40), std::pair(96, 104)})
      cases.push_back({"", {1, heads, 1, 1, 70 + heads, D, Dv}, {}});
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16})
    for (const Case& c : cases) {
      const Reference expected = Attention(c, dtype).reference(c);
      for (const std::string& isa : instruction_sets_that_differ(dtype)) {
        SCOPED_TRACE(isa + ", " + std::to_string(c.shape.H) + " heads, D=" + std::to_string(c.shape.D));
        force_cpu_instruction_set(isa);
        Attention run(c, dtype);
        run.forward(default_executor(1));
        expect_outputs(run, expected, dtype);
      }
    }
}

// As where results were merged: either infinity stands for a row that sees no key, whose LSE then has no gradient.
TEST(CpuBackward, RowsOfAnInfiniteLseAreEmpty) {
  const Choices restored;
  for (const auto& [queries, Hk] : {std::pair<std::int64_t, std::int64_t>{3, 1}, {3, 2}, {70, 2}}) {
    const Case c{"", {1, 2, Hk, queries, 80, 32, 32}, {}};
    Tensor dlse({1, 2, queries}, DType::f32);
    std::vector<char> keep(2 * queries * 80, 1);
    for (std::int64_t n = 0; n < dlse.size(); ++n) dlse.set(n, n < 2 ? 1.0 : 0.0);
    std::fill_n(keep.begin(), 2 * 80, char(0));  // The first two queries of the first head.
    const Reference expected = Attention(c, DType::f32).reference(c, keep);
    for (const std::string& isa : instruction_sets_that_differ(DType::f32)) {
      SCOPED_TRACE(isa + ", " + std::to_string(queries) + " queries");
      force_cpu_instruction_set(isa);
      Attention run(c, DType::f32);
      run.forward(default_executor(1));
      for (std::int64_t i = 0; i < 2; ++i) {
        run.lse.set(i, i == 0 ? HUGE_VAL : -HUGE_VAL);
        for (std::int64_t d = 0; d < 32; ++d) run.out.set(i * 2 * 32 + d, 0.0);
      }
      run.backward(default_executor(1), dlse.view());
      EXPECT_LE(relative_error(run.dq, expected.dq), tolerance(DType::f32));
      EXPECT_LE(relative_error(run.dk, expected.dk), tolerance(DType::f32));
      EXPECT_LE(relative_error(run.dv, expected.dv), tolerance(DType::f32));
      for (std::int64_t i = 0; i < 2; ++i) EXPECT_EQ(run.softmax_d.get(i), 0.0);
    }
  }
}

TEST(CpuExplanation, SaysWhereQueriesAre) {
  const Choices restored;
  const auto in_lanes = [](const Shape& shape, const Features& features, DType dtype = DType::f32) {
    const Attention attention({"", shape, features}, dtype);
    return explain(attention.problem, Pass::forward).tile.find("in the lanes") != std::string::npos;
  };
  for (const std::string& isa : cpu_instruction_sets()) {
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    const bool vectors_of_16 = multiplies_in_vectors_of_16(isa);
    cpu::suppose_core(cpu::Core::zen5);
    EXPECT_EQ(in_lanes({1, 2, 2, 256, 256, 64, 64}, {}), vectors_of_16);
    // So few rows of fp32 are not for tiles.
    EXPECT_EQ(in_lanes({1, 2, 2, 64, 64, 64, 64}, {}), vectors_of_16 || isa.rfind("amx", 0) == 0);
    EXPECT_EQ(in_lanes({1, 1, 1, 900, 900, 64, 64}, with(false, 100, 0, 0, false, 0)), vectors_of_16);
    EXPECT_EQ(in_lanes({1, 1, 1, 1500, 1500, 64, 64}, with(true, -1, -1, 0, false, 0)), vectors_of_16);
    EXPECT_FALSE(in_lanes({1, 1, 1, 900, 900, 64, 64}, {}));                                  // Many keys.
    EXPECT_FALSE(in_lanes({1, 2, 2, 256, 256, 64, 64}, with(false, -1, -1, 3.0, false, 0)));  // More than a factor.
    EXPECT_FALSE(in_lanes({1, 2, 1, 32, 64, 64, 64}, {}));      // Heads that share keys in place.
    EXPECT_FALSE(in_lanes({1, 2, 2, 100, 100, 64, 64}, {}));    // A quarter of the lanes would be empty.
    EXPECT_FALSE(in_lanes({1, 2, 2, 256, 256, 128, 128}, {}));  // Rows of many bytes.
    cpu::suppose_core(cpu::Core::zen4);
    EXPECT_EQ(in_lanes({1, 2, 2, 256, 256, 32, 32}, {}), vectors_of_16);
    EXPECT_FALSE(in_lanes({1, 2, 2, 256, 256, 64, 64}, {}));
    EXPECT_EQ(in_lanes({1, 2, 2, 256, 256, 128, 128}, {}, DType::bf16), isa == "avx512_bf16");  // Pairs: 256 bytes.
    EXPECT_FALSE(in_lanes({1, 2, 2, 256, 256, 136, 128}, {}, DType::bf16));
    cpu::suppose_core(cpu::Core::other);
    EXPECT_FALSE(in_lanes({1, 2, 2, 256, 256, 32, 32}, {}));
  }
}

TEST(CpuExplanation, SaysHowTallStripsAre) {
  const Choices restored;
  const Attention attention({"", {1, 2, 2, 256, 256, 128, 64}, {}}, DType::f32);
  const Attention wide({"", {1, 2, 2, 256, 256, 64, 132}, {}}, DType::f32);
  const Attention pairs({"", {1, 2, 2, 256, 256, 128, 64}, {}}, DType::bf16);
  for (const std::string& isa : cpu_instruction_sets()) {
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    const auto strips = [&](cpu::Core core, const Attention& of) {
      cpu::suppose_core(core);
      return explain(of.problem, Pass::backward).tile;
    };
    const std::string own = strips(cpu::Core::other, attention), tall = strips(cpu::Core::zen5, attention);
    const bool vectors_of_16 = multiplies_in_vectors_of_16(isa);
    EXPECT_EQ(own.find("strips of 4 keys x 64 queries") != std::string::npos, vectors_of_16);
    EXPECT_EQ(tall.find("strips of 8 keys x 32 queries") != std::string::npos, vectors_of_16);
    EXPECT_EQ(own == tall, !vectors_of_16);
    EXPECT_EQ(strips(cpu::Core::zen5, wide).find("strips of 8 keys"), std::string::npos);
    EXPECT_EQ(strips(cpu::Core::zen4, attention), own);
    if (isa != "avx512_bf16") continue;
    EXPECT_NE(strips(cpu::Core::zen4, pairs).find("strips of 8 keys"), std::string::npos);
  }
}

std::string case_name(const ::testing::TestParamInfo<CpuAttention::ParamType>& info) {
  return std::string(to_string(std::get<0>(info.param))) + "_" + std::get<1>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(Grid, CpuAttention,
                         ::testing::Combine(::testing::Values(DType::f32, DType::f16, DType::bf16, DType::f64),
                                            ::testing::ValuesIn(kCases)),
                         case_name);

}  // namespace
}  // namespace flash_attn::testing
