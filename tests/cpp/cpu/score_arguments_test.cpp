// Bias, masks, bounds of keys and sinks, with their gradients, against double precision: every instruction set, dtype
// and way of broadcasting.
#include <gtest/gtest.h>

#include "attention_reference.h"
#include "choices.h"

namespace flash_attn::testing {
namespace {

constexpr Shape kShape{2, 4, 2, 70, 150, 24, 40};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Sizes = std::vector<std::int64_t>;

struct Case {
  const char* name;
  Sizes bias = {}, mask = {}, begin = {}, end = {};  // Shapes; empty: not given.
  bool sink = false;
  bool dtype_of_q = false;  // Of bias and sink, else fp32.
  Features features = {};
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// The element of a table of (B|1, [H|1,] [Sq|1,] [Sk|1]) that holds for a pair; masks of two dims are (B|1, Sk|1), of
// three (B|1, Sq|1, Sk|1).
std::int64_t element(const Sizes& shape, bool has_keys, std::int64_t b, std::int64_t h, std::int64_t i,
                     std::int64_t j) {
  std::vector<std::int64_t> at{b};
  const std::size_t dims = shape.size() - (has_keys ? 1 : 0);
  if (dims == 3) at.push_back(h);
  if (dims >= 2) at.push_back(i);
  if (has_keys) at.push_back(j);
  std::int64_t n = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) n = n * shape[d] + (shape[d] == 1 ? 0 : at[d]);
  return n;
}

template <class Visit>
void for_each_pair(const Visit& visit) {
  for (std::int64_t b = 0; b < kShape.B; ++b)
    for (std::int64_t h = 0; h < kShape.H; ++h)
      for (std::int64_t i = 0; i < kShape.Sq; ++i)
        for (std::int64_t j = 0; j < kShape.Sk; ++j) visit(b, h, i, j);
}

std::int64_t count(const Sizes& shape) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  return n;
}

template <class Number>
TensorView view_of(std::vector<Number>& values, const Sizes& shape) {
  TensorView v;
  v.data = values.data();
  v.dtype = sizeof(Number) == 1 ? DType::boolean : DType::i32;
  v.ndim = static_cast<int>(shape.size());
  for (std::int64_t d = v.ndim - 1, stride = 1; d >= 0; stride *= shape[d], --d)
    v.sizes[d] = shape[d], v.strides[d] = stride;
  return v;
}

struct Attention {
  const Case& c;
  std::mt19937 generator{7};
  Tensor q, k, v, dout, bias, sink, out, lse, dq, dk, dv, softmax_d, dbias, dsink;
  std::vector<char> mask;
  std::vector<std::int32_t> begin, end;
  std::vector<std::int64_t> rng{3, 4};
  BackwardArgs args;

  Attention(const Case& chosen, DType dtype) : c(chosen) {
    const Shape& s = kShape;
    const auto random = [&](Sizes shape, DType type) { return Tensor::random(std::move(shape), type, generator); };
    const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32, table = c.dtype_of_q ? dtype : DType::f32;
    q = random({s.B, s.Sq, s.H, s.D}, dtype), k = random({s.B, s.Sk, s.Hk, s.D}, dtype);
    v = random({s.B, s.Sk, s.Hk, s.Dv}, dtype), dout = random({s.B, s.Sq, s.H, s.Dv}, dtype);
    out = Tensor({s.B, s.Sq, s.H, s.Dv}, dtype), lse = softmax_d = Tensor({s.B, s.H, s.Sq}, wide);
    dq = Tensor({s.B, s.Sq, s.H, s.D}, dtype), dk = Tensor({s.B, s.Sk, s.Hk, s.D}, dtype);
    dv = Tensor({s.B, s.Sk, s.Hk, s.Dv}, dtype);
    if (!c.bias.empty()) {
      bias = random(c.bias, table), dbias = Tensor(c.bias, table);
      for (std::int64_t n = 0; n < bias.size(); n += 3) bias.set(n, -kInfinity);
      if (c.bias[2] > 1) mask_rows_by_bias(table);
    }
    if (c.sink) {
      sink = random({s.H}, table), dsink = Tensor({s.H}, table);
      sink.set(1, -kInfinity);  // A head without one.
    }
    std::uniform_int_distribution<std::int32_t> key(-20, static_cast<std::int32_t>(s.Sk) + 20);
    for (std::int64_t n = 0; n < count(c.mask) && !c.mask.empty(); ++n) mask.push_back(generator() % 3 != 0 ? 5 : 0);
    for (std::int64_t n = 0; n < count(c.begin) && !c.begin.empty(); ++n) begin.push_back(key(generator) / 2);
    for (std::int64_t n = 0; n < count(c.end) && !c.end.empty(); ++n) end.push_back(key(generator));
    set_arguments();
  }
  // Numbers below -1e30 mask as minus infinity does, which shows where a row has no others.
  void mask_rows_by_bias(DType table) {
    const std::int64_t keys = c.bias[3];
    for (std::int64_t n = 0; n < bias.size(); ++n)
      if (n / keys % 5 == 2) bias.set(n, table == DType::f16 ? -kInfinity : -1.1e30 - 1e34 * double(n % 2));
  }
  void set_arguments() {
    AttentionProblem& p = args.problem;
    p.q = q.view(), p.k = k.view(), p.v = v.view();
    p.softmax_scale = 0.2, p.softcap = c.features.softcap, p.causal = c.features.causal;
    p.window_left = c.features.window_left, p.window_right = c.features.window_right;
    p.dropout_p = c.features.dropout_p;
    if (p.dropout_p > 0) {
      p.rng_state.data = rng.data(), p.rng_state.dtype = DType::i64, p.rng_state.ndim = 1;
      p.rng_state.sizes[0] = 2, p.rng_state.strides[0] = 1;
    }
    if (!c.bias.empty()) p.attn_bias = bias.view(), args.dbias = dbias.view();
    if (c.sink) p.learnable_sink = sink.view(), args.dsink = dsink.view();
    if (!c.mask.empty()) p.attn_mask = view_of(mask, c.mask);
    if (!c.begin.empty()) p.key_begin = view_of(begin, c.begin);
    if (!c.end.empty()) p.key_end = view_of(end, c.end);
    args.dout = dout.view(), args.out = out.view(), args.lse = lse.view();
    args.dq = dq.view(), args.dk = dk.view(), args.dv = dv.view(), args.softmax_d = softmax_d.view();
  }
  void run() {
    attention_forward({args.problem, args.out, args.lse, {}}, default_executor(2));
    attention_backward(args, default_executor(2));
  }
  Reference reference() const {
    Problem64 p{kShape, c.features, args.problem.softmax_scale, nullptr,
                make_dropout(c.features.dropout_p, rng[0], rng[1])};
    if (c.sink) p.sink = sink.values();
    p.keep.assign(kShape.B * kShape.H * kShape.Sq * kShape.Sk, 1);
    if (!c.bias.empty()) p.bias.resize(p.keep.size());
    for_each_pair([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
      const std::int64_t n = p.pair(b, h, i, j);
      if (!c.bias.empty()) p.bias[n] = bias.get(element(c.bias, true, b, h, i, j));
      const bool masked = !c.mask.empty() && !mask[element(c.mask, true, b, h, i, j)];
      const bool early = !c.begin.empty() && j < begin[element(c.begin, false, b, h, i, j)];
      const bool late = !c.end.empty() && j >= end[element(c.end, false, b, h, i, j)];
      p.keep[n] = !masked && !early && !late && (c.bias.empty() || p.bias[n] >= -1e30);
    });
    Reference r = p.run(q, k, v, dout);
    std::vector<double> summed(c.bias.empty() ? 0 : count(c.bias), 0.0);
    for_each_pair([&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
      if (!c.bias.empty()) summed[element(c.bias, true, b, h, i, j)] += r.dbias[p.pair(b, h, i, j)];
    });
    r.dbias = summed;
    return r;
  }
};

Features with(bool causal, std::int64_t left, double softcap, double dropout) {
  Features f;
  f.causal = causal, f.window_left = left, f.softcap = softcap, f.dropout_p = dropout;
  return f;
}

constexpr std::int64_t B = kShape.B, H = kShape.H, Sq = kShape.Sq, Sk = kShape.Sk;
const Case kCases[] = {
    {"bias", {B, H, Sq, Sk}},
    {"bias_of_q_dtype", {B, H, Sq, Sk}, {}, {}, {}, false, true},
    {"bias_per_key", {1, 1, 1, Sk}},
    {"bias_per_head", {1, H, Sq, Sk}, {}, {}, {}, false, false, with(true, -1, 5.0, 0)},
    {"bias_per_batch", {B, 1, Sq, Sk}, {}, {}, {}, true, false, with(true, 40, 0, 0.2)},
    {"mask_of_keys", {}, {B, Sk}},
    {"mask_of_rows", {}, {1, Sq, Sk}},
    {"mask_of_heads", {}, {B, H, Sq, Sk}, {}, {}, false, false, with(true, -1, 0, 0.3)},
    {"mask_of_whole_rows", {}, {B, H, Sq, 1}},
    {"bounds", {}, {}, {B, Sq}, {B, Sq}},
    {"bounds_of_heads", {}, {}, {B, H, Sq}, {1, 1, Sq}, false, false, with(true, 60, 0, 0)},
    {"end_alone", {}, {}, {}, {1, Sq}},
    {"sink", {}, {}, {}, {}, true},
    {"sink_of_q_dtype", {}, {}, {}, {}, true, true, with(true, -1, 4.0, 0)},
    {"sink_of_empty_rows", {}, {B, H, Sq, 1}, {}, {}, true},
    {"everything", {B, 1, 1, Sk}, {B, 1, Sq, Sk}, {1, Sq}, {B, H, Sq}, true, true, with(true, 100, 6.0, 0)},
};

class ScoreArguments : public ::testing::TestWithParam<std::tuple<DType, Case>> {
  const Choices restored_;
};

TEST_P(ScoreArguments, MatchDoublePrecision) {
  const auto& [dtype, c] = GetParam();
  const Reference expected = Attention(c, dtype).reference();
  const double bound = tolerance(dtype), table_bound = std::max(bound, tolerance(c.dtype_of_q ? dtype : DType::f32));
  for (const std::string& isa : instruction_sets_that_differ(dtype)) {
    SCOPED_TRACE(isa);
    force_cpu_instruction_set(isa);
    Attention r(c, dtype);
    r.run();
    EXPECT_LE(relative_error(r.out, expected.out), bound);
    EXPECT_LE(relative_error(r.lse, expected.lse), dtype == DType::f64 ? 1e-12 : 1e-6);
    EXPECT_LE(relative_error(r.dq, expected.dq), bound);
    EXPECT_LE(relative_error(r.dk, expected.dk), bound);
    EXPECT_LE(relative_error(r.dv, expected.dv), bound);
    if (!c.bias.empty()) {
      EXPECT_LE(relative_error(r.dbias, expected.dbias), table_bound);
    }
    if (c.sink) {
      EXPECT_LE(relative_error(r.dsink, expected.dsink), table_bound);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, ScoreArguments,
                         ::testing::Combine(::testing::Values(DType::f32, DType::f16, DType::bf16, DType::f64),
                                            ::testing::ValuesIn(kCases)),
                         [](const auto& info) {
                           return std::string(to_string(std::get<0>(info.param))) + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace flash_attn::testing
