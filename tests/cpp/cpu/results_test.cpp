// Results that are stored past the caches.
#include "cpu/results.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "attention_reference.h"
#include "choices.h"
#include "cpu/workspace.h"

namespace flash_attn::testing {
namespace {

constexpr std::int64_t kQueries = 2100, kHeads = 8, kFeatures = 64;
constexpr char kPoison = 0x5a;

// Memory for a result (1, queries, heads, features) whose rows are so many features apart, the first of them so many
// bytes after the beginning of a cache line.
class Result {
 public:
  Result(DType dtype, std::int64_t shift, std::int64_t apart)
      : row_bytes_(kFeatures * std::int64_t(size_of(dtype))),
        step_(apart * std::int64_t(size_of(dtype))),
        room_(kQueries * kHeads * step_ + shift + cpu::kCacheLine),
        view_(Tensor({1, kQueries, kHeads, apart}, dtype).view()) {
    std::memset(room_.data(), kPoison, static_cast<std::size_t>(kQueries * kHeads * step_ + shift + cpu::kCacheLine));
    view_.data = room_.data() + shift;
    view_.sizes[3] = kFeatures;
  }
  const TensorView& view() const { return view_; }
  std::string rows() const {
    std::string all;
    for (std::int64_t r = 0; r < kQueries * kHeads; ++r) all.append(row(r), static_cast<std::size_t>(row_bytes_));
    return all;
  }
  // Nothing is written behind the last row, or between rows that are apart.
  bool ends_there() const {
    return row(kQueries * kHeads)[0] == kPoison && (step_ == row_bytes_ || row(0)[row_bytes_] == kPoison);
  }

 private:
  const char* row(std::int64_t r) const { return static_cast<const char*>(view_.data) + r * step_; }

  std::int64_t row_bytes_, step_;
  cpu::Workspace room_;
  TensorView view_;
};

struct Results {
  Result out, dq, dk, dv;
  Results(DType dtype, std::int64_t shift, std::int64_t apart)
      : out(dtype, shift, apart), dq(dtype, shift, apart), dk(dtype, shift, apart), dv(dtype, shift, apart) {}
};

struct Inputs {
  Tensor q, k, v, dout;
  AttentionProblem problem;

  explicit Inputs(DType dtype) {
    std::mt19937 generator(3);
    for (Tensor* x : {&q, &k, &v, &dout}) *x = Tensor::random({1, kQueries, kHeads, kFeatures}, dtype, generator);
    problem.q = q.view(), problem.k = k.view(), problem.v = v.view();
    problem.softmax_scale = 0.125;
    problem.window_left = 9, problem.window_right = 0;
  }
  void attend(const Results& r) {
    const Executor& executor = default_executor(1);
    Tensor lse({1, kHeads, kQueries}, DType::f32), softmax_d({1, kHeads, kQueries}, DType::f32);
    ForwardArgs f;
    f.problem = problem, f.out = r.out.view(), f.lse = lse.view();
    attention_forward(f, executor);
    BackwardArgs b;
    b.problem = problem, b.dout = dout.view(), b.out = r.out.view(), b.lse = lse.view();
    b.dq = r.dq.view(), b.dk = r.dk.view(), b.dv = r.dv.view(), b.softmax_d = softmax_d.view();
    attention_backward(b, executor);
  }
};

// Rows that do not begin with a cache line go through the caches, whatever their number.
TEST(CpuResults, AreTheSamePastTheCaches) {
  const Choices restored;
  cpu::suppose_core(cpu::Core::zen4);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Inputs inputs(dtype);
    ASSERT_TRUE(cpu::stores_past_caches(kQueries * kHeads * kFeatures * std::int64_t(size_of(dtype)), 1));
    for (const std::string& isa : instruction_sets_that_differ(dtype)) {
      if (isa == "portable") continue;  // Has no such stores.
      SCOPED_TRACE(isa + ", " + to_string(dtype));
      force_cpu_instruction_set(isa);
      const Results past(dtype, 0, kFeatures), shifted(dtype, 16, kFeatures), apart(dtype, 0, kFeatures + 8);
      for (const Results* r : {&past, &shifted, &apart}) {
        inputs.attend(*r);
        for (const Result* x : {&r->out, &r->dq, &r->dk, &r->dv}) EXPECT_TRUE(x->ends_there());
        EXPECT_EQ(past.out.rows(), r->out.rows());
        EXPECT_EQ(past.dq.rows(), r->dq.rows());
        EXPECT_EQ(past.dk.rows(), r->dk.rows());
        EXPECT_EQ(past.dv.rows(), r->dv.rows());
      }
    }
  }
}

// The choice itself, which results do not show.
TEST(CpuResults, GoPastTheCachesInWholeLines) {
  const Choices restored;
  cpu::suppose_core(cpu::Core::zen4);
  constexpr std::int64_t kMany = std::int64_t(3) << 20, kRow = kHeads * kFeatures;
  auto format = cpu::row_format<cpu::Portable32>(DType::f32);
  EXPECT_EQ(format.stream_rows, nullptr);
  alignas(cpu::kCacheLine) float memory[32];
  const Operand whole{memory, kQueries * kRow, kRow, kFeatures};
  const auto past = [&](const Operand& x, std::int64_t features, std::int64_t bytes) {
    return cpu::result_rows(format, x, features, bytes, default_executor(1)) == format.stream_rows;
  };
  EXPECT_FALSE(past(whole, kFeatures, kMany));  // No such stores.
  format.stream_rows = [](const float*, std::int64_t, const float*, std::int64_t, std::int64_t, char*, std::int64_t) {};
  EXPECT_TRUE(past(whole, kFeatures, kMany));
  EXPECT_FALSE(past(whole, kFeatures, kMany / 3));
  EXPECT_FALSE(past(whole, kFeatures - 8, kMany));
  EXPECT_FALSE(past({memory + 4, kQueries * kRow, kRow, kFeatures}, kFeatures, kMany));
  EXPECT_FALSE(past({memory, kQueries * kRow + 8, kRow, kFeatures}, kFeatures, kMany));
  EXPECT_FALSE(past({memory, kQueries * kRow, kRow + 8, kFeatures}, kFeatures, kMany));
  EXPECT_FALSE(past({memory, kQueries * kRow, kRow, kFeatures + 8}, kFeatures, kMany));
}

TEST(CpuResults, GoPastCachesThatAreTooSmallForThem) {
  const Choices restored;
  constexpr std::int64_t kMegabyte = std::int64_t(1) << 20;
  cpu::suppose_core(cpu::Core::zen4);
  EXPECT_FALSE(cpu::stores_past_caches(2 * kMegabyte, 1));
  EXPECT_TRUE(cpu::stores_past_caches(2 * kMegabyte + 1, 1));
  EXPECT_FALSE(cpu::stores_past_caches(32 * kMegabyte, 16));
  EXPECT_TRUE(cpu::stores_past_caches(33 * kMegabyte, 16));
  for (const cpu::Core core : {cpu::Core::zen5, cpu::Core::other}) {
    cpu::suppose_core(core);
    EXPECT_FALSE(cpu::stores_past_caches(100 * kMegabyte, 1));
  }
}

}  // namespace
}  // namespace flash_attn::testing
