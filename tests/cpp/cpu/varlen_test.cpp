// Packed batches: each sequence gives what the dense call gives for it, bit for bit, and nobody's rows are left
// unwritten.
#include <gtest/gtest.h>

#include "attention_reference.h"
#include "choices.h"

namespace flash_attn::testing {
namespace {

constexpr std::int64_t H = 4, Hk = 2, D = 40, Dv = 24;

TensorView rows_of(Tensor& packed, std::int64_t first, std::int64_t n) {
  TensorView v = packed.view();
  v.data = static_cast<float*>(v.data) + first * v.strides[0];
  v.ndim = 4;
  v.sizes = {1, n, v.sizes[1], v.sizes[2]};
  v.strides = {0, v.strides[0], v.strides[1], 1};
  return v;
}

TensorView int_vector(std::vector<std::int32_t>& values) {
  TensorView v;
  v.data = values.data();
  v.dtype = DType::i32;
  v.ndim = 1;
  v.sizes[0] = static_cast<std::int64_t>(values.size());
  v.strides[0] = 1;
  return v;
}

struct Packed {
  Tensor q, k, v, dout, out, lse, dq, dk, dv, softmax_d;
  Packed(std::int64_t Tq, std::int64_t Tk) {
    std::mt19937 generator(3);
    q = Tensor::random({Tq, H, D}, DType::f32, generator);
    k = Tensor::random({Tk, Hk, D}, DType::f32, generator);
    v = Tensor::random({Tk, Hk, Dv}, DType::f32, generator);
    dout = Tensor::random({Tq, H, Dv}, DType::f32, generator);
    out = Tensor({Tq, H, Dv}, DType::f32);
    lse = softmax_d = Tensor({H, Tq}, DType::f32);
    dq = Tensor({Tq, H, D}, DType::f32);
    dk = Tensor({Tk, Hk, D}, DType::f32);
    dv = Tensor({Tk, Hk, Dv}, DType::f32);
  }
};

// Slopes of sequences and heads, and bounds of heads and rows.
struct Tables {
  std::vector<float> slopes;
  std::vector<std::int32_t> end;
  std::int64_t rows;
  Tables(std::int64_t sequences, std::int64_t Tq) : rows(Tq) {
    for (std::int64_t n = 0; n < sequences * H; ++n) slopes.push_back(0.01f * float(n + 1));
    for (std::int64_t n = 0; n < H * Tq; ++n) end.push_back(std::int32_t(n * 7 % 400));
  }
  void put_into(AttentionProblem& p) {
    p.alibi_slopes.data = slopes.data();
    p.alibi_slopes.ndim = 2, p.alibi_slopes.sizes = {std::int64_t(slopes.size()) / H, H},
    p.alibi_slopes.strides = {H, 1};
    p.key_end.data = end.data(), p.key_end.dtype = DType::i32;
    p.key_end.ndim = 2, p.key_end.sizes = {H, rows}, p.key_end.strides = {rows, 1};
  }
  // Those of sequence s with n rows from `first` on.
  void put_into(AttentionProblem& p, std::size_t s, std::int64_t first, std::int64_t n) {
    put_into(p);
    p.alibi_slopes.data = slopes.data() + s * H, p.alibi_slopes.sizes[0] = 1;
    p.key_end.data = end.data() + first;
    p.key_end.ndim = 3, p.key_end.sizes = {1, H, n}, p.key_end.strides = {0, rows, 1};
  }
};

class CpuVarlen : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Tables, CpuVarlen, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "given" : "none"; });

TEST_P(CpuVarlen, EqualsDensePerSequence) {
  const Choices restored;
  cpu::suppose_core(cpu::Core::zen5);  // Queries of the last sequence fill them (cpu/lanes.h), those of others do not.
  // Empty on either side, Sq > Sk, one row, and rows after the last sequence (3 queries, 4 keys).
  std::vector<std::int32_t> cu_q{0, 130, 130, 180, 181, 251, 379}, cu_k{0, 300, 320, 320, 620, 650, 850};
  const std::int64_t Tq = 382, Tk = 854;
  Packed packed(Tq, Tk), dense(Tq, Tk);
  ForwardArgs f;
  f.problem.q = packed.q.view(), f.problem.k = packed.k.view(), f.problem.v = packed.v.view();
  f.problem.cu_seqlens_q = int_vector(cu_q), f.problem.cu_seqlens_k = int_vector(cu_k);
  f.problem.max_seqlen_q = 1000, f.problem.max_seqlen_k = 1000;
  f.problem.softmax_scale = 0.2;
  f.problem.causal = true;
  Tables tables(6, Tq);
  if (GetParam()) tables.put_into(f.problem);
  f.out = packed.out.view(), f.lse = packed.lse.view();
  BackwardArgs b;
  b.problem = f.problem;
  b.dout = packed.dout.view(), b.out = packed.out.view(), b.lse = packed.lse.view(),
  b.softmax_d = packed.softmax_d.view();
  b.dq = packed.dq.view(), b.dk = packed.dk.view(), b.dv = packed.dv.view();
  attention_forward(f, default_executor(2));
  attention_backward(b, default_executor(2));

  for (std::size_t s = 0; s + 1 < cu_q.size(); ++s) {
    const std::int64_t q0 = cu_q[s], Sq = cu_q[s + 1] - q0, k0 = cu_k[s], Sk = cu_k[s + 1] - k0;
    Tensor lse({1, H, Sq}, DType::f32), softmax_d({1, H, Sq}, DType::f32);
    ForwardArgs one;
    one.problem.q = rows_of(dense.q, q0, Sq), one.problem.k = rows_of(dense.k, k0, Sk);
    one.problem.v = rows_of(dense.v, k0, Sk);
    one.problem.softmax_scale = 0.2;
    one.problem.causal = true;
    if (GetParam()) tables.put_into(one.problem, s, q0, Sq);
    one.out = rows_of(dense.out, q0, Sq), one.lse = lse.view();
    BackwardArgs back;
    back.problem = one.problem;
    back.dout = rows_of(dense.dout, q0, Sq), back.out = one.out, back.lse = lse.view(),
    back.softmax_d = softmax_d.view();
    back.dq = rows_of(dense.dq, q0, Sq), back.dk = rows_of(dense.dk, k0, Sk), back.dv = rows_of(dense.dv, k0, Sk);
    attention_forward(one, default_executor(1));
    attention_backward(back, default_executor(1));
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t i = 0; i < Sq; ++i) {
        EXPECT_EQ(packed.lse.get(h * Tq + q0 + i), lse.get(h * Sq + i));
        EXPECT_EQ(packed.softmax_d.get(h * Tq + q0 + i), softmax_d.get(h * Sq + i));
      }
  }
  const auto expect_rows = [](const Tensor& got, const Tensor& expected, std::int64_t row, std::int64_t owned) {
    for (std::int64_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got.get(i), i < owned * row ? expected.get(i) : 0.0) << "element " << i % row << " of row " << i / row;
  };
  expect_rows(packed.out, dense.out, H * Dv, cu_q.back());
  expect_rows(packed.dq, dense.dq, H * D, cu_q.back());
  expect_rows(packed.dk, dense.dk, Hk * D, cu_k.back());
  expect_rows(packed.dv, dense.dv, Hk * Dv, cu_k.back());
  for (std::int64_t h = 0; h < H; ++h)
    for (std::int64_t i = cu_q.back(); i < Tq; ++i) {
      EXPECT_TRUE(std::isinf(packed.lse.get(h * Tq + i)) && packed.lse.get(h * Tq + i) > 0);
      EXPECT_EQ(packed.softmax_d.get(h * Tq + i), 0.0);
    }
}

// In each precision of the LSE; that of fp32 is above.
TEST(CpuVarlenSlack, LseOfRowsAfterTheLastSequenceIsThatOfNoKeysInFp64) {
  std::mt19937 generator(3);
  Tensor q = Tensor::random({5, H, D}, DType::f64, generator), k = Tensor::random({4, Hk, D}, DType::f64, generator);
  Tensor out({5, H, D}, DType::f64), lse({H, 5}, DType::f64);
  std::vector<std::int32_t> cu_q{0, 3}, cu_k{0, 4};
  ForwardArgs f;
  f.problem.q = q.view(), f.problem.k = f.problem.v = k.view();
  f.problem.cu_seqlens_q = int_vector(cu_q), f.problem.cu_seqlens_k = int_vector(cu_k);
  f.problem.max_seqlen_q = 3, f.problem.max_seqlen_k = 4;
  f.out = out.view(), f.lse = lse.view();
  attention_forward(f, default_executor(1));
  for (std::int64_t n = 0; n < lse.size(); ++n)
    EXPECT_EQ(lse.get(n) == std::numeric_limits<double>::infinity(), n % 5 >= 3) << n;
}

}  // namespace
}  // namespace flash_attn::testing
