// Caches and pages: what is appended lies where it should, and pages change where keys lie, not what is computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "attention_reference.h"

namespace flash_attn::testing {
namespace {

constexpr std::int64_t B = 2, H = 4, Hk = 2, Sq = 3, D = 24, Dv = 16, kSlots = 150, kNew = 3;

TensorView ints(std::vector<std::int32_t>& values, std::vector<std::int64_t> shape) {
  TensorView v;
  v.data = values.data();
  v.dtype = DType::i32;
  v.ndim = static_cast<int>(shape.size());
  for (int d = v.ndim - 1, stride = 1; d >= 0; stride *= static_cast<int>(shape[d]), --d) {
    v.sizes[d] = shape[d];
    v.strides[d] = stride;
  }
  return v;
}

struct Cache {
  std::mt19937 generator{3};
  DType dtype;
  Tensor q, k, v, k_new, v_new, cos, sin, out, lse;
  std::vector<std::int32_t> used{147, 20}, pages;
  CacheArgs args;

  // page 0: one row of the cache per sequence.
  Cache(DType type, std::int64_t page) : dtype(type) {
    const std::int64_t per_sequence = page ? (kSlots + page - 1) / page : 1;
    const std::int64_t rows = B * per_sequence, length = page ? page : kSlots;
    q = Tensor::random({B, Sq, H, D}, dtype, generator);
    k_new = Tensor::random({B, kNew, Hk, D}, dtype, generator);
    v_new = Tensor::random({B, kNew, Hk, Dv}, dtype, generator);
    cos = Tensor::random({264, D / 2}, dtype, generator);
    sin = Tensor::random({264, D / 2}, dtype, generator);
    k = Tensor({rows, length, Hk, D}, dtype), v = Tensor({rows, length, Hk, Dv}, dtype);
    out = Tensor({B, Sq, H, Dv}, dtype);
    lse = Tensor({B, H, Sq}, dtype == DType::f64 ? DType::f64 : DType::f32);
    pages.resize(rows);
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), generator);
    std::mt19937 contents(5);
    std::normal_distribution<double> normal;
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t slot = 0; slot < kSlots; ++slot) {
        for (std::int64_t n = 0; n < Hk * D; ++n) k.set(row(b, slot, page) * Hk * D + n, normal(contents));
        for (std::int64_t n = 0; n < Hk * Dv; ++n) v.set(row(b, slot, page) * Hk * Dv + n, normal(contents));
      }
    AttentionProblem& p = args.problem;
    p.q = q.view(), p.k = k.view(), p.v = v.view();
    p.softmax_scale = 0.2, p.causal = true;
    p.seqused_k = ints(used, {B});
    if (page) p.block_table = ints(pages, {B, per_sequence});
    args.k_new = k_new.view(), args.v_new = v_new.view();
    args.out = out.view(), args.lse = lse.view();
  }
  std::int64_t row(std::int64_t b, std::int64_t slot, std::int64_t page) const {
    if (!page) return b * kSlots + slot;
    return pages[b * ((kSlots + page - 1) / page) + slot / page] * page + slot % page;
  }
  void run() { attention_with_cache(args, default_executor(2)); }
};

class PagedCache : public ::testing::TestWithParam<std::tuple<DType, int>> {};

TEST_P(PagedCache, EqualsRowsToTheBit) {
  const auto [dtype, page] = GetParam();
  for (const bool rotated : {false, true}) {
    Cache rows(dtype, 0), paged(dtype, page);
    for (Cache* c : {&rows, &paged}) {
      if (rotated) c->args.rotary_cos = c->cos.view(), c->args.rotary_sin = c->sin.view();
      c->run();
    }
    EXPECT_EQ(rows.out.bytes(), paged.out.bytes());
    EXPECT_EQ(rows.lse.bytes(), paged.lse.bytes());
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t i = 0; i < kNew; ++i)
        for (std::int64_t n = 0; n < Hk * Dv; ++n)
          EXPECT_EQ(paged.v.get(paged.row(b, paged.used[b] + i, page) * Hk * Dv + n),
                    paged.v_new.get((b * kNew + i) * Hk * Dv + n));
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, PagedCache,
                         ::testing::Combine(::testing::Values(DType::f32, DType::f16, DType::bf16, DType::f64),
                                            ::testing::Values(1, 7, 64, 256)));

TEST(Cache, BadCallsWriteNothing) {
  const std::vector<std::pair<const char*, std::function<void(Cache&)>>> kBad = {
      {"block_table has 3 pages of 64", [](Cache& c) { c.used[0] = 190; }},
      {"cache_seqlens must not be negative", [](Cache& c) { c.used[1] = -1; }},
      {"block_table must hold pages from 0 to 5", [](Cache& c) { c.pages[0] = 6; }},
      {"k and v come together", [](Cache& c) { c.args.v_new = {}; }},
      {"cache_seqlens is missing", [](Cache& c) { c.args.problem.seqused_k = {}; }},
      {"rotary_cos and rotary_sin come together", [](Cache& c) { c.args.rotary_cos = c.cos.view(); }},
      {"num_splits must be from 0 to 128", [](Cache& c) { c.args.problem.num_splits = 129; }},
      {"out must have shape", [](Cache& c) { c.args.out.sizes[3] = 3; }},
  };
  for (const auto& [says, spoil] : kBad) {
    Cache c(DType::f32, 64);
    spoil(c);
    const auto k = c.k.bytes(), v = c.v.bytes();
    try {
      c.run();
      FAIL() << says;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
    }
    EXPECT_EQ(c.k.bytes(), k);
    EXPECT_EQ(c.v.bytes(), v);
  }
}

TEST(Cache, IsExplainedWithoutResults) {
  Cache c(DType::f32, 64);
  c.args.out = {}, c.args.lse = {};
  EXPECT_EQ(explain(c.args).backend, "cpu");
  c.used[1] = -1;
  try {
    explain(c.args);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cache_seqlens must not be negative"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace flash_attn::testing
