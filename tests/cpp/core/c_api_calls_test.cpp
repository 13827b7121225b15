// Every call of the C interface against the same call of the C++ one, to the bit; the versions of every struct; the
// caller's threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "attention_reference.h"
#include "flash_attn/flash_attn.h"
#include "flash_attn/rotary.h"

namespace flash_attn::testing {
namespace {

constexpr std::int64_t B = 2, H = 4, Hk = 2, Sq = 33, Sk = 70, D = 24, Dv = 16, kNew = 3;

flash_attn_tensor to_c(const TensorView& v) {
  flash_attn_tensor t{v.data, static_cast<std::int32_t>(v.dtype), v.ndim, {}, {}};
  std::copy(v.sizes.begin(), v.sizes.end(), t.sizes);
  std::copy(v.strides.begin(), v.strides.end(), t.strides);
  return t;
}
TensorView ints(std::vector<std::int32_t>& values) {
  TensorView v;
  v.data = values.data(), v.dtype = DType::i32, v.ndim = 1;
  v.sizes[0] = static_cast<std::int64_t>(values.size()), v.strides[0] = 1;
  return v;
}

using Executors = const flash_attn_executor*;

// One problem with every result that a call of it writes, computed by either interface.
class Call {
 public:
  virtual ~Call() = default;
  virtual void run_cpp() = 0;
  virtual flash_attn_status run_c(Executors executor) = 0;
  std::vector<std::vector<char>> results() const {
    std::vector<std::vector<char>> all;
    for (const Tensor* t : written) all.push_back(t->bytes());
    return all;
  }

 protected:
  Tensor random(std::vector<std::int64_t> shape) { return Tensor::random(std::move(shape), DType::f32, generator); }
  std::mt19937 generator{5};
  std::vector<const Tensor*> written;
};

// Forward and backward; packed or not.
class Attention : public Call {
 public:
  explicit Attention(bool is_packed) : packed(is_packed) {
    q = random(rows(Sq, H, D)), k = random(rows(Sk, Hk, D)), v = random(rows(Sk, Hk, Dv));
    dout = random(rows(Sq, H, Dv));
    out = Tensor(rows(Sq, H, Dv), DType::f32), dq = Tensor(rows(Sq, H, D), DType::f32);
    dk = Tensor(rows(Sk, Hk, D), DType::f32), dv = Tensor(rows(Sk, Hk, Dv), DType::f32);
    lse = softmax_d = packed ? Tensor({H, B * Sq}, DType::f32) : Tensor({B, H, Sq}, DType::f32);
    dlse = random(packed ? std::vector<std::int64_t>{H, B * Sq} : std::vector<std::int64_t>{B, H, Sq});
    bias = random({B, 1, Sq, Sk}), dbias = Tensor({B, 1, Sq, Sk}, DType::f32);
    sink = random({H}), dsink = Tensor({H}, DType::f32);
    written = {&out, &lse, &dq, &dk, &dv, &softmax_d, &dbias, &dsink};
  }
  void run_cpp() override {
    BackwardArgs b;
    AttentionProblem& p = b.problem;
    p.q = q.view(), p.k = k.view(), p.v = v.view();
    if (packed) p.cu_seqlens_q = ints(cu_q), p.cu_seqlens_k = ints(cu_k), p.max_seqlen_q = Sq, p.max_seqlen_k = Sk;
    p.softmax_scale = 0.3, p.softcap = 7, p.causal = true, p.window_left = 40;
    p.attn_bias = bias.view(), p.learnable_sink = sink.view();
    attention_forward({p, out.view(), lse.view(), {}}, default_executor(2));
    b.dout = dout.view(), b.out = out.view(), b.lse = lse.view();
    b.dq = dq.view(), b.dk = dk.view(), b.dv = dv.view(), b.softmax_d = softmax_d.view();
    b.dlse = dlse.view(), b.dbias = dbias.view(), b.dsink = dsink.view();
    attention_backward(b, default_executor(2));
  }
  flash_attn_status run_c(Executors executor) override {
    flash_attn_problem p;
    flash_attn_problem_init(&p);
    p.q = to_c(q.view()), p.k = to_c(k.view()), p.v = to_c(v.view());
    if (packed)
      p.cu_seqlens_q = to_c(ints(cu_q)), p.cu_seqlens_k = to_c(ints(cu_k)), p.max_seqlen_q = Sq, p.max_seqlen_k = Sk;
    p.softmax_scale = 0.3, p.softcap = 7, p.causal = 1, p.window_left = 40;
    p.attn_bias = to_c(bias.view()), p.learnable_sink = to_c(sink.view());
    flash_attn_forward_args f;
    flash_attn_forward_args_init(&f);
    f.problem = &p, f.out = to_c(out.view()), f.lse = to_c(lse.view());
    if (const auto status = flash_attn_forward(&f, executor); status != FLASH_ATTN_OK) return status;
    flash_attn_backward_args b;
    flash_attn_backward_args_init(&b);
    b.problem = &p, b.dout = to_c(dout.view()), b.out = f.out, b.lse = f.lse;
    b.dq = to_c(dq.view()), b.dk = to_c(dk.view()), b.dv = to_c(dv.view()), b.softmax_d = to_c(softmax_d.view());
    b.dlse = to_c(dlse.view()), b.dbias = to_c(dbias.view()), b.dsink = to_c(dsink.view());
    return flash_attn_backward(&b, executor);
  }

 private:
  std::vector<std::int64_t> rows(std::int64_t length, std::int64_t heads, std::int64_t features) const {
    if (packed) return {B * length, heads, features};
    return {B, length, heads, features};
  }
  bool packed;
  std::vector<std::int32_t> cu_q{0, 30, 60}, cu_k{0, 70, 120};
  Tensor q, k, v, dout, out, lse, dq, dk, dv, softmax_d, dlse, bias, dbias, sink, dsink;
};

// Appends with rotation, then attends; over rows or pages.
class Cache : public Call {
 public:
  explicit Cache(bool is_paged) : paged(is_paged) {
    q = random({B, kNew, H, D}), k_new = random({B, kNew, Hk, D}), v_new = random({B, kNew, Hk, Dv});
    const std::int64_t parts = paged ? 10 : B, length = paged ? 16 : 80;
    k = random({parts, length, Hk, D}), v = random({parts, length, Hk, Dv});
    cos = random({80, D / 2}), sin = random({80, D / 2});
    out = Tensor({B, kNew, H, Dv}, DType::f32), lse = Tensor({B, H, kNew}, DType::f32);
    written = {&k, &v, &out, &lse};
  }
  void run_cpp() override {
    CacheArgs a;
    AttentionProblem& p = a.problem;
    p.q = q.view(), p.k = k.view(), p.v = v.view(), p.seqused_k = ints(used), p.leftpad_k = ints(leftpad);
    if (paged) p.block_table = table();
    p.softmax_scale = 0.3, p.causal = true, p.num_splits = 2;
    a.k_new = k_new.view(), a.v_new = v_new.view(), a.rotary_cos = cos.view(), a.rotary_sin = sin.view();
    a.rotary_interleaved = false, a.out = out.view(), a.lse = lse.view();
    attention_with_cache(a, default_executor(2));
  }
  flash_attn_status run_c(Executors executor) override {
    flash_attn_problem p;
    flash_attn_problem_init(&p);
    p.q = to_c(q.view()), p.k = to_c(k.view()), p.v = to_c(v.view());
    p.seqused_k = to_c(ints(used)), p.leftpad_k = to_c(ints(leftpad));
    if (paged) p.block_table = to_c(table());
    p.softmax_scale = 0.3, p.causal = 1, p.num_splits = 2;
    flash_attn_cache_args a;
    flash_attn_cache_args_init(&a);
    EXPECT_EQ(a.rotary_interleaved, 1);
    a.problem = &p, a.k_new = to_c(k_new.view()), a.v_new = to_c(v_new.view());
    a.rotary_cos = to_c(cos.view()), a.rotary_sin = to_c(sin.view()), a.rotary_interleaved = 0;
    a.out = to_c(out.view()), a.lse = to_c(lse.view());
    return flash_attn_with_cache(&a, executor);
  }

 private:
  TensorView table() {
    TensorView t = ints(pages);
    t.ndim = 2, t.sizes = {B, 5}, t.strides = {5, 1};
    return t;
  }
  bool paged;
  std::vector<std::int32_t> used{60, 13}, leftpad{0, 4}, pages{7, 2, 9, 0, 4, 1, 3, 5, 6, 8};
  Tensor q, k_new, v_new, k, v, cos, sin, out, lse;
};

class Rotary : public Call {
 public:
  Rotary() {
    x = random({B * Sq, kHeads, D}), cos = random({80, D / 2}), sin = random({80, D / 2});
    out = Tensor({B * Sq, kHeads, D}, DType::f32);
    written = {&out};
  }
  void run_cpp() override {
    apply_rotary({x.view(), cos.view(), sin.view(), out.view(), 2, ints(offsets), ints(cu_seqlens), Sq, true, true},
                 default_executor(2));
  }
  flash_attn_status run_c(Executors executor) override {
    flash_attn_rotary_args a;
    flash_attn_rotary_args_init(&a);
    a.x = to_c(x.view()), a.cos = to_c(cos.view()), a.sin = to_c(sin.view()), a.out = to_c(out.view());
    a.offset = 2, a.offsets = to_c(ints(offsets)), a.cu_seqlens = to_c(ints(cu_seqlens)), a.max_seqlen = Sq;
    a.interleaved = a.conjugate = 1;
    return flash_attn_rotary(&a, executor);
  }

 private:
  static constexpr std::int64_t kHeads = 64;  // Enough work for several threads.
  std::vector<std::int32_t> offsets{5, 0}, cu_seqlens{0, 30, 60};
  Tensor x, cos, sin, out;
};

struct Named {
  const char* name;
  std::function<std::unique_ptr<Call>()> make;
};
std::ostream& operator<<(std::ostream& out, const Named& c) { return out << c.name; }

class CCalls : public ::testing::TestWithParam<Named> {};

TEST_P(CCalls, EqualTheCppInterfaceToTheBit) {
  const auto cpp = GetParam().make(), c = GetParam().make();
  const auto before = c->results();
  cpp->run_cpp();
  ASSERT_EQ(c->run_c(nullptr), FLASH_ATTN_OK) << flash_attn_last_error();
  EXPECT_NE(c->results(), before);
  EXPECT_EQ(c->results(), cpp->results());
}

// What a hook was asked to do, and that it was asked for nothing that the interface does not promise.
struct Hook {
  int most = 0;  // Workers that it offers beside the first.
  std::atomic<int> runs{0}, bodies{0}, largest{0};

  static void run(void* context, int n, void (*body)(void*, int), void* arg) {
    Hook& hook = *static_cast<Hook*>(context);
    ++hook.runs;
    if (n > hook.largest) hook.largest = n;
    std::vector<std::thread> threads;
    for (int worker = 0; worker < n && worker <= hook.most; ++worker, ++hook.bodies)
      threads.emplace_back(body, arg, worker);
    for (std::thread& thread : threads) thread.join();
  }
};

TEST_P(CCalls, TheCallersThreadsDoAllOfIt) {
  const auto cpp = GetParam().make();
  cpp->run_cpp();
  for (const int offered : {0, 1, 3}) {
    const auto c = GetParam().make();
    Hook hook;
    hook.most = offered;
    const flash_attn_executor executor{sizeof(executor), 4, 0, Hook::run, &hook};
    ASSERT_EQ(c->run_c(&executor), FLASH_ATTN_OK) << flash_attn_last_error();
    EXPECT_EQ(c->results(), cpp->results()) << offered << " more threads";
    EXPECT_GT(hook.runs, 0);
    EXPECT_GT(hook.largest, 1);
    EXPECT_LE(hook.largest, 4);
    EXPECT_GE(hook.bodies, hook.runs);
    if (offered > 0) {
      EXPECT_GT(hook.bodies, hook.runs);
    }
  }
}

TEST_P(CCalls, OneThreadNeedsNoHook) {
  const auto cpp = GetParam().make(), c = GetParam().make();
  cpp->run_cpp();
  const flash_attn_executor executor{sizeof(executor), 1, 0, nullptr, nullptr};
  ASSERT_EQ(c->run_c(&executor), FLASH_ATTN_OK) << flash_attn_last_error();
  EXPECT_EQ(c->results(), cpp->results());
}

template <class T, class... Arguments>
Named named(const char* name, Arguments... arguments) {
  return {name, [=] { return std::make_unique<T>(arguments...); }};
}
INSTANTIATE_TEST_SUITE_P(All, CCalls,
                         ::testing::Values(named<Attention>("dense", false), named<Attention>("varlen", true),
                                           named<Cache>("cache", false), named<Cache>("paged", true),
                                           named<Rotary>("rotary")),
                         [](const auto& info) { return info.param.name; });

// A struct of an older header ends after its first `known` bytes; one of a newer header has bytes that this library
// does not know, which must be zero. Returns the status of a call with only that struct.
template <class Args>
void check_versions(void (*init)(Args*), flash_attn_status (*call)(const Args*, Executors), std::size_t oldest) {
  struct {
    Args args;
    std::int64_t later;
  } given;
  init(&given.args);
  given.later = 0;
  EXPECT_EQ(given.args.struct_size, sizeof(Args));
  const flash_attn_status plain = call(&given.args, nullptr);
  EXPECT_EQ(plain, FLASH_ATTN_INVALID);
  const std::string text = flash_attn_last_error();
  for (const std::size_t size : {oldest, sizeof(Args), sizeof(given)}) {
    given.args.struct_size = size;
    EXPECT_EQ(call(&given.args, nullptr), plain) << size;
    EXPECT_EQ(flash_attn_last_error(), text) << size;
  }
  given.later = 1;
  EXPECT_EQ(call(&given.args, nullptr), FLASH_ATTN_VERSION);
  EXPECT_NE(std::string(flash_attn_last_error()).find(std::to_string(sizeof(given))), std::string::npos);
  for (const std::size_t size : {std::size_t(0), std::size_t(4), sizeof(Args) - 4}) {
    given.args.struct_size = size;
    EXPECT_EQ(call(&given.args, nullptr), FLASH_ATTN_VERSION) << size;
  }
}

TEST(CVersions, OfEveryArgumentStruct) {
  check_versions(flash_attn_forward_args_init, flash_attn_forward, offsetof(flash_attn_forward_args, s_dmask));
  check_versions(flash_attn_backward_args_init, flash_attn_backward, offsetof(flash_attn_backward_args, dlse));
  check_versions(flash_attn_cache_args_init, flash_attn_with_cache, offsetof(flash_attn_cache_args, out));
  check_versions(flash_attn_rotary_args_init, flash_attn_rotary, offsetof(flash_attn_rotary_args, offsets));
}

// Bytes before `size` become what _init writes, the rest stay as they are; of what is beyond the library's, zeros.
template <class Struct>
void check_defaults(void (*write)(Struct*, std::size_t), void (*init)(Struct*)) {
  struct {
    Struct known;
    std::int64_t later, beyond;
  } given;
  Struct all;
  init(&all);
  EXPECT_EQ(all.struct_size, sizeof(Struct));
  for (const std::size_t size : {sizeof(std::size_t), sizeof(Struct) / 2, sizeof(Struct), sizeof(Struct) + 8}) {
    std::memset(&given, 0x5a, sizeof(given));
    write(&given.known, size);
    std::string expected(sizeof(given), '\x5a');
    std::memset(expected.data(), 0, size);
    std::memcpy(expected.data(), &all, std::min(size, sizeof(all)));
    std::memcpy(expected.data(), &size, sizeof(size));
    EXPECT_EQ(std::memcmp(&given, expected.data(), sizeof(given)), 0) << size << " of " << sizeof(Struct);
  }
}

TEST(CVersions, DefaultsAreWrittenIntoWhatTheCallerHas) {
  check_defaults(flash_attn_default_problem, flash_attn_problem_init);
  check_defaults(flash_attn_default_forward_args, flash_attn_forward_args_init);
  check_defaults(flash_attn_default_backward_args, flash_attn_backward_args_init);
  check_defaults(flash_attn_default_cache_args, flash_attn_cache_args_init);
  check_defaults(flash_attn_default_rotary_args, flash_attn_rotary_args_init);
  flash_attn_problem problem;
  flash_attn_problem_init(&problem);
  EXPECT_EQ(problem.softmax_scale, 1.0);
  EXPECT_EQ(problem.window_left, -1);
  EXPECT_EQ(problem.window_right, -1);
}

TEST(CVersions, OfTheExecutor) {
  Rotary call;
  struct {
    flash_attn_executor executor;
    std::int64_t later;
  } given{{sizeof(given), 1, 0, nullptr, nullptr}, 0};
  EXPECT_EQ(call.run_c(&given.executor), FLASH_ATTN_OK) << flash_attn_last_error();
  given.executor.struct_size = offsetof(flash_attn_executor, run);
  EXPECT_EQ(call.run_c(&given.executor), FLASH_ATTN_OK) << flash_attn_last_error();
  given.executor.struct_size = sizeof(given), given.later = 1;
  EXPECT_EQ(call.run_c(&given.executor), FLASH_ATTN_VERSION);
  EXPECT_NE(std::string(flash_attn_last_error()).find("struct_size of executor"), std::string::npos);
  given.executor.struct_size = sizeof(flash_attn_executor), given.executor.num_threads = 0;
  EXPECT_EQ(call.run_c(&given.executor), FLASH_ATTN_INVALID);
  EXPECT_NE(std::string(flash_attn_last_error()).find("executor.num_threads"), std::string::npos);
}

TEST(CErrors, EachThreadHasItsOwnTextUntilItsNextError) {
  EXPECT_EQ(flash_attn_forward(nullptr, nullptr), FLASH_ATTN_INVALID);
  const std::string mine = flash_attn_last_error();
  std::thread([&] {
    EXPECT_STREQ(flash_attn_last_error(), "");
    flash_attn_rotary_args args;
    flash_attn_rotary_args_init(&args);
    EXPECT_EQ(flash_attn_rotary(&args, nullptr), FLASH_ATTN_INVALID);
    EXPECT_NE(std::string(flash_attn_last_error()).find("x must have shape"), std::string::npos);
  }).join();
  EXPECT_EQ(flash_attn_last_error(), mine);
  Rotary good;
  EXPECT_EQ(good.run_c(nullptr), FLASH_ATTN_OK);
  EXPECT_EQ(flash_attn_last_error(), mine);
}

}  // namespace
}  // namespace flash_attn::testing
