// The C interface: versions of structs, status codes, the error text, the caller's threads.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "flash_attn/attention.h"
#include "flash_attn/flash_attn.h"

namespace {

constexpr std::int64_t kRows = 70, kHeads = 2, kDim = 8;

struct Call {
  std::vector<float> q = numbers(0), k = numbers(1), v = numbers(2), out = std::vector<float>(q.size(), NAN);
  std::vector<float> lse = std::vector<float>(kRows * kHeads, NAN);
  flash_attn_problem problem;
  flash_attn_forward_args args;

  Call() {
    flash_attn_problem_init(&problem);
    flash_attn_forward_args_init(&args);
    problem.q = rows(q), problem.k = rows(k), problem.v = rows(v);
    args.problem = &problem, args.out = rows(out);
    args.lse = {lse.data(), FLASH_ATTN_F32, 3, {1, kHeads, kRows, 0}, {kHeads * kRows, kRows, 1, 0}};
  }
  static std::vector<float> numbers(int seed) {
    std::vector<float> x(kRows * kHeads * kDim);
    for (std::size_t n = 0; n < x.size(); ++n) x[n] = std::sin(float(n) * 0.7f + float(seed));
    return x;
  }
  static flash_attn_tensor rows(std::vector<float>& x) {
    return {x.data(), FLASH_ATTN_F32, 4, {1, kRows, kHeads, kDim}, {kRows * kHeads * kDim, kHeads * kDim, kDim, 1}};
  }
  flash_attn_status run(const flash_attn_executor* executor = nullptr) { return flash_attn_forward(&args, executor); }
};

TEST(CApi, ComputesWhatTheCppInterfaceDoes) {
  Call call;
  call.problem.causal = 1, call.problem.window_left = 20;
  ASSERT_EQ(call.run(), FLASH_ATTN_OK) << flash_attn_last_error();

  flash_attn::ForwardArgs args;
  std::vector<float> out(call.out.size()), lse(call.lse.size());
  const auto view = [](std::vector<float>& x, int ndim, std::array<std::int64_t, 4> sizes,
                       std::array<std::int64_t, 4> strides) {
    flash_attn::TensorView t;
    t.data = x.data(), t.ndim = ndim, t.sizes = sizes, t.strides = strides;
    return t;
  };
  const auto rows = [&](std::vector<float>& x) {
    return view(x, 4, {1, kRows, kHeads, kDim}, {kRows * kHeads * kDim, kHeads * kDim, kDim, 1});
  };
  args.problem.q = rows(call.q), args.problem.k = rows(call.k), args.problem.v = rows(call.v), args.out = rows(out);
  args.lse = view(lse, 3, {1, kHeads, kRows, 0}, {kHeads * kRows, kRows, 1, 0});
  args.problem.causal = true, args.problem.window_left = 20;
  flash_attn::attention_forward(args, flash_attn::default_executor(1));
  EXPECT_EQ(out, call.out);
  EXPECT_EQ(lse, call.lse);
}

TEST(CApi, AnOlderProgramsStructsHaveDefaultsForTheRest) {
  Call call;
  // As if learnable_sink and what precedes it from attn_bias on had come later; garbage lies behind.
  std::memset(&call.problem.attn_bias, 0x5a, sizeof(call.problem) - offsetof(flash_attn_problem, attn_bias));
  call.problem.struct_size = offsetof(flash_attn_problem, attn_bias);
  std::memset(&call.args.s_dmask, 0x5a, sizeof(call.args.s_dmask));
  call.args.struct_size = offsetof(flash_attn_forward_args, s_dmask);
  EXPECT_EQ(call.run(), FLASH_ATTN_OK) << flash_attn_last_error();
}

TEST(CApi, ANewerProgramIsRefusedOnlyWhenItUsesWhatIsNew) {
  Call call;
  struct {
    flash_attn_forward_args args;
    std::int64_t later = 0;
  } newer{call.args};
  newer.args.struct_size = sizeof(newer);
  EXPECT_EQ(flash_attn_forward(&newer.args, nullptr), FLASH_ATTN_OK) << flash_attn_last_error();
  newer.later = 1;
  EXPECT_EQ(flash_attn_forward(&newer.args, nullptr), FLASH_ATTN_VERSION);
  EXPECT_NE(std::string(flash_attn_last_error()).find("struct_size of args"), std::string::npos);
}

TEST(CApi, StructsThatWereNotInitialisedAreRefused) {
  Call call;
  call.problem.struct_size = 0;
  EXPECT_EQ(call.run(), FLASH_ATTN_VERSION);
  call.args.problem = nullptr;
  EXPECT_EQ(call.run(), FLASH_ATTN_INVALID);
  EXPECT_EQ(flash_attn_forward(nullptr, nullptr), FLASH_ATTN_INVALID);
  EXPECT_EQ(flash_attn_backward(nullptr, nullptr), FLASH_ATTN_INVALID);
  EXPECT_EQ(flash_attn_with_cache(nullptr, nullptr), FLASH_ATTN_INVALID);
}

TEST(CApi, BadTensorsAreNamedAndNothingIsWritten) {
  const auto refused = [](auto change, const char* text) {
    Call call;
    change(call);
    EXPECT_EQ(call.run(), FLASH_ATTN_INVALID);
    EXPECT_NE(std::string(flash_attn_last_error()).find(text), std::string::npos) << flash_attn_last_error();
    EXPECT_TRUE(std::isnan(call.out[0]) && std::isnan(call.lse[0]));
  };
  refused([](Call& c) { c.problem.k.ndim = 5; }, "k.ndim");
  refused([](Call& c) { c.problem.k.ndim = -1; }, "k.ndim");
  for (const int dtype : {-1, 7}) refused([=](Call& c) { c.problem.k.dtype = dtype; }, "k.dtype");
  refused([](Call& c) { c.problem.v.data = nullptr; }, "v.data");
  refused([](Call& c) { c.problem.v.sizes[1] = -1; }, "v.sizes");
  refused([](Call& c) { c.problem.v.data = nullptr, c.problem.v.sizes[1] = std::int64_t(1) << 60; },
          "v must have a shape");
  refused([](Call& c) { c.problem.k.sizes[3] = 4; }, "k must have shape");
  refused([](Call& c) { c.problem.softmax_scale = NAN; }, "softmax_scale");
}

// Each is found to be something else than it has to be.
TEST(CApi, EveryTensorOfAProblemIsLookedAt) {
  using P = flash_attn_problem;
  const std::pair<const char*, flash_attn_tensor P::*> tensors[] = {{"k", &P::k},
                                                                    {"v", &P::v},
                                                                    {"alibi_slopes", &P::alibi_slopes},
                                                                    {"rng_state", &P::rng_state},
                                                                    {"attn_bias", &P::attn_bias},
                                                                    {"attn_mask", &P::attn_mask},
                                                                    {"key_begin", &P::key_begin},
                                                                    {"key_end", &P::key_end},
                                                                    {"block_table", &P::block_table},
                                                                    {"cache_batch_idx", &P::cache_batch_idx},
                                                                    {"seqused_k", &P::seqused_k},
                                                                    {"leftpad_k", &P::leftpad_k},
                                                                    {"learnable_sink", &P::learnable_sink}};
  for (const auto& [name, tensor] : tensors) {
    Call call;
    call.problem.dropout_p = 0.5;
    std::array<std::int64_t, 2> state{};
    call.problem.rng_state = {state.data(), FLASH_ATTN_I64, 1, {2}, {1}};
    (call.problem.*tensor) = {call.q.data(), FLASH_ATTN_F32, 2, {1, 1}, {1, 1}};
    EXPECT_EQ(call.run(), FLASH_ATTN_INVALID);
    EXPECT_NE(std::string(flash_attn_last_error()).find(std::string("flash_attn: ") + name), std::string::npos)
        << name << ": " << flash_attn_last_error();
  }
}

TEST(CApi, EveryNumberOfAProblemIsLookedAt) {
  Call plain, window;
  window.problem.window_right = 3;
  EXPECT_EQ(plain.run(), FLASH_ATTN_OK);
  EXPECT_EQ(window.run(), FLASH_ATTN_OK) << flash_attn_last_error();
  EXPECT_NE(window.out, plain.out);
  for (const auto& [says, change] :
       {std::pair<const char*, void (*)(Call&)>{"dropout_p", [](Call& c) { c.problem.dropout_p = 1.0; }},
        {"num_splits", [](Call& c) { c.problem.num_splits = -1; }},
        {"S_dmask", [](Call& c) { c.args.s_dmask = c.args.lse; }}}) {
    Call call;
    change(call);
    EXPECT_EQ(call.run(), FLASH_ATTN_INVALID) << says;
    EXPECT_NE(std::string(flash_attn_last_error()).find(says), std::string::npos) << flash_attn_last_error();
  }
}

TEST(CApi, WhatHasNoElementsNeedsNoMemory) {
  Call call;
  call.problem.k = call.problem.v = {nullptr, FLASH_ATTN_F32, 4, {1, 0, kHeads, kDim}, {0, 0, 0, 1}};
  EXPECT_EQ(call.run(), FLASH_ATTN_OK) << flash_attn_last_error();
  EXPECT_EQ(call.out[0], 0.0f);
  EXPECT_TRUE(std::isinf(call.lse[0]));
}

TEST(CApi, TheErrorTextBelongsToTheThread) {
  Call call;
  call.problem.k.ndim = 5;
  EXPECT_EQ(call.run(), FLASH_ATTN_INVALID);
  std::string other = "unset";
  std::thread([&] { other = flash_attn_last_error(); }).join();
  EXPECT_EQ(other, "");
}

// Destructors of a thread's objects may call, too, after those of what the library keeps for the thread.
TEST(CApi, WorksWhileAThreadEnds) {
  static std::vector<float> out;
  static std::string error;
  struct CallsAtLast {
    bool used = false;
    ~CallsAtLast() {
      Call call;
      if (call.run() == FLASH_ATTN_OK) out = call.out;
      call.problem.k.ndim = 5;
      call.run();
      error = flash_attn_last_error();
    }
  };
  Call plain;
  std::thread([&] {
    thread_local CallsAtLast last;
    last.used = true;
    ASSERT_EQ(plain.run(), FLASH_ATTN_OK);
  }).join();
  EXPECT_EQ(out, plain.out);
  EXPECT_NE(error.find("k.ndim"), std::string::npos);
}

TEST(CApi, TheCallersThreadsAreUsed) {
  Call call, plain;
  ASSERT_EQ(plain.run(), FLASH_ATTN_OK);
  int calls = 0;
  flash_attn_executor executor{sizeof(flash_attn_executor), 3, 0, nullptr, &calls};
  EXPECT_EQ(call.run(&executor), FLASH_ATTN_INVALID);  // three threads and nothing that runs them
  executor.run = [](void* context, int n, void (*body)(void*, int), void* arg) {
    ++*static_cast<int*>(context);
    std::vector<std::thread> threads;
    for (int worker = 0; worker < n; ++worker) threads.emplace_back(body, arg, worker);
    for (std::thread& thread : threads) thread.join();
  };
  ASSERT_EQ(call.run(&executor), FLASH_ATTN_OK) << flash_attn_last_error();
  EXPECT_GT(calls, 0);
  EXPECT_EQ(call.out, plain.out);
}

TEST(CApi, VersionsAgree) { EXPECT_STREQ(flash_attn_version(), flash_attn::kVersion); }

}  // namespace
