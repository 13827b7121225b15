// Caches and pages: what is appended lies where it should, and pages change where keys lie, not what is computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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
    for (std::int64_t n = page ? (used[1] + kNew + page - 1) / page : 1; n < per_sequence; ++n)
      pages[per_sequence + n] = -1;  // Which no key needs.
    args.k_new = k_new.view(), args.v_new = v_new.view();
    args.out = out.view(), args.lse = lse.view();
  }
  std::int64_t row(std::int64_t b, std::int64_t slot, std::int64_t page) const {
    if (!page) return b * kSlots + slot;
    return pages[b * ((kSlots + page - 1) / page) + slot / page] * page + slot % page;
  }
  void rotate() { args.rotary_cos = cos.view(), args.rotary_sin = sin.view(); }
  // Tables for all slots of three pages of 64, the last of which gets one new key while q has more rows. The slots past
  // kSlots hold keys, too.
  void rotate_past_the_tables() {
    rotate();
    k = Tensor::random({B * 3, 64, Hk, D}, dtype, generator), v = Tensor::random({B * 3, 64, Hk, Dv}, dtype, generator);
    args.problem.k = k.view(), args.problem.v = v.view();
    args.rotary_cos.sizes[0] = args.rotary_sin.sizes[0] = 192;
    args.k_new.sizes[1] = args.v_new.sizes[1] = 1, used[0] = 191;
  }
  void run() { attention_with_cache(args, default_executor(2)); }
};

class PagedCache : public ::testing::TestWithParam<std::tuple<DType, int>> {};

TEST_P(PagedCache, EqualsRowsToTheBit) {
  const auto [dtype, page] = GetParam();
  for (const bool rotated : {false, true}) {
    Cache rows(dtype, 0), paged(dtype, page);
    for (Cache* c : {&rows, &paged}) {
      if (rotated) c->rotate();
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

// So many that tasks share what is appended and rotated: for each sequence what a call of its own gives.
TEST(Cache, ManySequencesAreAppendedAndRotatedAsOne) {
  constexpr std::int64_t kMany = 96;
  std::mt19937 generator(9);
  const auto random = [&](std::vector<std::int64_t> shape) {
    return Tensor::random(std::move(shape), DType::f32, generator);
  };
  Tensor q = random({kMany, Sq, H, D}), k_new = random({kMany, kNew, Hk, D}), v_new = random({kMany, kNew, Hk, Dv});
  Tensor cos = random({20, D / 2}), sin = random({20, D / 2});
  std::vector<std::int32_t> used;
  for (std::int32_t b = 0; b < kMany; ++b) used.push_back(b % 18);
  struct Written {
    Tensor k, v, out{{kMany, Sq, H, Dv}, DType::f32}, lse{{kMany, H, Sq}, DType::f32};
  } together{random({kMany, 20, Hk, D}), random({kMany, 20, Hk, Dv})};
  Written apart = together;
  // Of sequences [first, first + n).
  const auto call = [&](Written& w, std::int64_t first, std::int64_t n) {
    const auto part = [&](TensorView view) {
      view.data = static_cast<char*>(view.data) + first * view.strides[0] * size_of(view.dtype);
      view.sizes[0] = n;
      return view;
    };
    CacheArgs args;
    AttentionProblem& p = args.problem;
    p.q = part(q.view()), p.k = part(w.k.view()), p.v = part(w.v.view()), p.seqused_k = part(ints(used, {kMany}));
    args.k_new = part(k_new.view()), args.v_new = part(v_new.view());
    args.rotary_cos = cos.view(), args.rotary_sin = sin.view();
    args.out = part(w.out.view()), args.lse = part(w.lse.view());
    attention_with_cache(args, default_executor(3));
  };
  call(together, 0, kMany);
  for (std::int64_t b = 0; b < kMany; ++b) call(apart, b, 1);
  EXPECT_EQ(together.k.bytes(), apart.k.bytes());
  EXPECT_EQ(together.v.bytes(), apart.v.bytes());
  EXPECT_EQ(together.out.bytes(), apart.out.bytes());
}

// Heads of new keys two heads apart, with and without rotation.
TEST(Cache, HeadsOfNewKeysLieWhereTheirStridesSay) {
  for (const bool rotated : {false, true}) {
    Cache dense(DType::f32, 0), apart(DType::f32, 0);
    Tensor wide({B, kNew, 2 * Hk, D}, DType::f32);
    for (std::int64_t row = 0; row < B * kNew * Hk; ++row)
      for (std::int64_t n = 0; n < D; ++n) wide.set(2 * row * D + n, apart.k_new.get(row * D + n));
    apart.args.k_new = wide.view();
    apart.args.k_new.sizes[2] = Hk, apart.args.k_new.strides[2] *= 2;
    for (Cache* c : {&dense, &apart}) {
      if (rotated) c->rotate();
      c->run();
    }
    EXPECT_EQ(apart.k.bytes(), dense.k.bytes());
    EXPECT_EQ(apart.out.bytes(), dense.out.bytes());
  }
}

TEST(Cache, ValuesMayBeWiderThanKeys) {
  constexpr std::int64_t kWide = 2 * D;
  std::mt19937 generator(4);
  Cache c(DType::f32, 0);
  Tensor v = Tensor::random({B, kSlots, Hk, kWide}, DType::f32, generator);
  Tensor v_new = Tensor::random({B, kNew, Hk, kWide}, DType::f32, generator), out({B, Sq, H, kWide}, DType::f32);
  c.args.problem.v = v.view(), c.args.v_new = v_new.view(), c.args.out = out.view();
  c.run();
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t n = 0; n < kNew * Hk * kWide; ++n)
      ASSERT_EQ(v.get((b * kSlots + c.used[b]) * Hk * kWide + n), v_new.get(b * kNew * Hk * kWide + n)) << n;
}

// Rows of q packed, keys in pages: the lengths of packed keys say nothing of where pages begin.
TEST(Cache, PackedQueriesReadPagesFromTheirFirstSlot) {
  Cache dense(DType::f32, 7), packed(DType::f32, 7);
  for (Cache* c : {&dense, &packed}) c->args.k_new = c->args.v_new = {};
  dense.run();
  std::vector<std::int32_t> cu_q{0, Sq, 2 * Sq}, cu_k{0, packed.used[0], packed.used[0] + packed.used[1]};
  Tensor lse({H, B * Sq}, DType::f32);
  AttentionProblem& p = packed.args.problem;
  p.cu_seqlens_q = ints(cu_q, {B + 1}), p.cu_seqlens_k = ints(cu_k, {B + 1});
  p.max_seqlen_q = Sq, p.max_seqlen_k = packed.used[0];
  ForwardArgs args{p, packed.args.out, lse.view(), {}};
  for (TensorView* t : {&args.problem.q, &args.out}) {
    t->ndim = 3;
    t->sizes = {B * Sq, H, t->sizes[3]}, t->strides = {t->strides[1], t->strides[2], 1};
  }
  attention_forward(args, default_executor(2));
  EXPECT_EQ(packed.out.bytes(), dense.out.bytes());
}

TEST(Cache, NewKeysAreTheLastOnes) {
  Cache appending(DType::f32, 0), later(DType::f32, 0);
  appending.run();
  later.k = appending.k, later.v = appending.v;
  later.args.problem.k = later.k.view(), later.args.problem.v = later.v.view();
  later.args.k_new = later.args.v_new = {};
  for (std::int32_t& length : later.used) length += kNew;
  later.run();
  EXPECT_EQ(later.out.bytes(), appending.out.bytes());
}

// The first sequence against a cache that begins after its padding; of the second nothing is left.
TEST(Cache, KeysBeginAfterTheirPadding) {
  constexpr std::int64_t kPad = 9;
  std::vector<std::int32_t> leftpad{kPad, 30};
  Cache rows(DType::f32, 0);
  for (TensorView* t : {&rows.args.problem.k, &rows.args.problem.v}) {
    t->data = static_cast<float*>(t->data) + kPad * t->strides[1];
    t->sizes[1] -= kPad;
  }
  rows.used[0] -= kPad;
  rows.run();
  for (const std::int64_t page : {0, 7}) {
    Cache padded(DType::f32, page);
    padded.args.problem.leftpad_k = ints(leftpad, {B});
    padded.run();
    for (std::int64_t n = 0; n < padded.out.size(); ++n)
      ASSERT_EQ(padded.out.get(n), n < padded.out.size() / B ? rows.out.get(n) : 0.0) << n;
    for (std::int64_t n = 0; n < padded.lse.size(); ++n)
      ASSERT_EQ(padded.lse.get(n), n < padded.lse.size() / B ? rows.lse.get(n) : HUGE_VAL) << n;
  }
}

// The same as with the other batch element first.
TEST(Cache, SequencesReadTheBatchElementsThatTheyName) {
  std::vector<std::int32_t> index{1, 0};
  Cache named(DType::f32, 0), turned(DType::f32, 0);
  named.args.problem.cache_batch_idx = ints(index, {B});
  for (TensorView* t : {&turned.args.problem.k, &turned.args.problem.v}) {
    t->data = static_cast<float*>(t->data) + t->strides[0];
    t->strides[0] = -t->strides[0];
  }
  named.run(), turned.run();
  EXPECT_EQ(named.out.bytes(), turned.out.bytes());
  EXPECT_EQ(named.k.bytes(), turned.k.bytes());
}

TEST(Cache, BadCallsWriteNothing) {
  const std::vector<std::pair<const char*, std::function<void(Cache&)>>> kBad = {
      {"block_table has 3 pages of 64", [](Cache& c) { c.used[0] = 190; }},
      {"cache_seqlens must not be negative", [](Cache& c) { c.used[1] = -1; }},
      {"block_table must hold pages from 0 to 5", [](Cache& c) { c.pages[0] = 6; }},
      {"k and v come together", [](Cache& c) { c.args.v_new = {}; }},
      {"cache_seqlens is missing", [](Cache& c) { c.args.problem.seqused_k = {}; }},
      {"rotary_cos and rotary_sin come together", [](Cache& c) { c.args.rotary_cos = c.cos.view(); }},
      {"num_splits must be from 0 to 128", [](Cache& c) { c.args.problem.num_splits = 129; }},
      {"k must have 4 dimensions", [](Cache& c) { c.args.k_new.ndim = 3; }},
      {"k must have a contiguous last", [](Cache& c) { c.args.k_new.strides[3] = 2; }},
      {"cu_seqlens were given", [](Cache& c) { c.args.problem.cu_seqlens_q = c.args.problem.seqused_k; }},
      {"rotary_sin must be contiguous", [](Cache& c) { c.rotate(), c.args.rotary_sin.strides[0] = D; }},
      {"a position for each row of q, from cache_seqlens[0] = 191", [](Cache& c) { c.rotate_past_the_tables(); }},
      {"a position for each row of q, from cache_seqlens[0] = 191",
       [](Cache& c) {
         c.rotate_past_the_tables();
         c.args.problem.causal = false, c.args.problem.window_left = 3;
       }},
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

// All rows stand at one position where nothing is hidden from any of them.
TEST(Cache, TablesNeedNoMorePositionsThanAreLookedUp) {
  Cache causal(DType::f32, 64), plain(DType::f32, 64);
  causal.rotate_past_the_tables(), causal.used[0] = 189;
  EXPECT_NO_THROW(causal.run());
  plain.rotate_past_the_tables(), plain.args.problem.causal = false;
  EXPECT_NO_THROW(plain.run());
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
