// One case per check of core/validate.cpp: the text names the argument and what was passed, and no output is touched.
#include "core/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "attention_reference.h"
#include "core/checks.h"

namespace flash_attn::testing {
namespace {

TensorView vector_of(void* data, DType dtype, std::int64_t n) {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.ndim = 1;
  v.sizes[0] = n;
  v.strides[0] = 1;
  return v;
}

// A valid call, dense (B 2, Sq 3, Sk 5, H 4, Hk 2, D 8, Dv 6) or packed (two sequences), to be spoiled by one change.
struct Call {
  Tensor q, k, v, out, lse, dout, dq, dk, dv, softmax_d, s_dmask;
  std::vector<std::int32_t> cu_q{0, 2, 6}, cu_k{0, 4, 10}, pages{0, 1, 1, 0};
  std::vector<float> slopes{1, 2, 3, 4};
  std::vector<std::int64_t> rng{1, 2};
  Tensor bias{{2, 1, 3, 5}, DType::f32}, sink{{4}, DType::f32}, dbias = bias, dsink = sink;
  ForwardArgs forward;
  BackwardArgs backward;

  explicit Call(bool packed) {
    const auto make = [&](std::int64_t rows, std::int64_t heads, std::int64_t features) {
      return packed ? Tensor({2 * rows, heads, features}, DType::f32) : Tensor({2, rows, heads, features}, DType::f32);
    };
    q = make(3, 4, 8), dq = make(3, 4, 8);
    k = make(5, 2, 8), dk = make(5, 2, 8);
    v = make(5, 2, 6), dv = make(5, 2, 6);
    out = make(3, 4, 6), dout = make(3, 4, 6);
    lse = packed ? Tensor({4, 6}, DType::f32) : Tensor({2, 4, 3}, DType::f32);
    softmax_d = lse;
    s_dmask = packed ? Tensor({2, 4, 4, 6}, DType::f32) : Tensor({2, 4, 3, 5}, DType::f32);
    AttentionProblem& p = forward.problem;
    p.q = q.view(), p.k = k.view(), p.v = v.view();
    if (packed) {
      p.cu_seqlens_q = vector_of(cu_q.data(), DType::i32, 3);
      p.cu_seqlens_k = vector_of(cu_k.data(), DType::i32, 3);
      p.max_seqlen_q = 4;
      p.max_seqlen_k = 6;
    }
    p.alibi_slopes = vector_of(slopes.data(), DType::f32, 4);
    forward.out = out.view(), forward.lse = lse.view();
    backward.problem = p;
    backward.dout = dout.view(), backward.out = out.view(), backward.lse = lse.view();
    backward.dq = dq.view(), backward.dk = dk.view(), backward.dv = dv.view(), backward.softmax_d = softmax_d.view();
  }
  // Packed queries, and keys in two pages of as many slots.
  void with_pages(std::int64_t slots) {
    AttentionProblem& p = forward.problem;
    p.k.ndim = p.v.ndim = 4;
    p.k.sizes = {2, slots, 2, 8}, p.k.strides = {slots * 16, 16, 8, 1};
    p.v.sizes = {2, slots, 2, 6}, p.v.strides = {slots * 12, 12, 6, 1};
    p.block_table = vector_of(pages.data(), DType::i32, 2);
    p.block_table.ndim = 2, p.block_table.sizes = {2, 2}, p.block_table.strides = {2, 1};
  }
  void with_dropout() {
    forward.problem.dropout_p = 0.5;
    forward.problem.rng_state = vector_of(rng.data(), DType::i64, 2);
  }
};

struct Violation {
  const char* name;
  std::vector<const char*> fragments;  // Each stands in the text.
  std::function<void(Call&)> spoil;
};

#define SPOIL(...)               \
  [](Call& c) {                  \
    auto& p = c.forward.problem; \
    (void)p;                     \
    __VA_ARGS__;                 \
  }

const Violation kDense[] = {
    {"q missing", {"q is missing"}, SPOIL(p.q = {})},
    {"k missing", {"k is missing", "(B, Sk, Hk, D)"}, SPOIL(p.k = {})},
    {"v missing", {"v is missing"}, SPOIL(p.v = {})},
    {"q integer", {"q must be float16", "int32"}, SPOIL(p.q.dtype = DType::i32)},
    {"k dtype", {"k must have dtype float32", "float16"}, SPOIL(p.k.dtype = DType::f16)},
    {"v dtype", {"v must have dtype float32", "bfloat16"}, SPOIL(p.v.dtype = DType::bf16)},
    {"q dimensions", {"q must have 4 dimensions", "(2, 3, 4)"}, SPOIL(p.q.ndim = 3)},
    {"k dimensions", {"k must have 4 dimensions", "(2, 5, 2)"}, SPOIL(p.k.ndim = 3)},
    {"q last stride", {"q must have a contiguous last dimension", ".contiguous()"}, SPOIL(p.q.strides[3] = 2)},
    {"k last stride", {"k must have a contiguous last dimension"}, SPOIL(p.k.strides[3] = 2)},
    {"v last stride", {"v must have a contiguous last dimension"}, SPOIL(p.v.strides[3] = 2)},
    {"k batch", {"k must have shape", "(2, 5, 2, 8)", "(1, 5, 2, 8)"}, SPOIL(p.k.sizes[0] = 1)},
    {"k head dim", {"k must have shape", "(2, 5, 2, 7)"}, SPOIL(p.k.sizes[3] = 7)},
    {"v rows", {"v must have shape", "(2, 4, 2, 6)"}, SPOIL(p.v.sizes[1] = 4)},
    {"v heads", {"v must have shape", "(2, 5, 1, 6)"}, SPOIL(p.v.sizes[2] = 1)},
    {"batch", {"B must be positive"}, SPOIL(p.q.sizes[0] = p.k.sizes[0] = p.v.sizes[0] = 0)},
    {"heads", {"Hk must divide", "H = 4", "Hk = 3"}, SPOIL(p.k.sizes[2] = p.v.sizes[2] = 3)},
    {"no heads", {"Hk must divide", "H = 0"}, SPOIL(p.q.sizes[2] = 0)},
    {"no key heads", {"Hk must divide", "Hk = 0"}, SPOIL(p.k.sizes[2] = p.v.sizes[2] = 0)},
    {"head dim 0", {"head dim D", "1 to 576", "got 0"}, SPOIL(p.q.sizes[3] = p.k.sizes[3] = 0)},
    {"head dim 577", {"head dim D", "got 577"}, SPOIL(p.q.sizes[3] = p.k.sizes[3] = 577)},
    {"value head dim", {"head dim Dv", "got 600"}, SPOIL(p.v.sizes[3] = 600)},
    {"q negative", {"q must have a shape", "(2, -3, 4, 8)"}, SPOIL(p.q.sizes[1] = -3)},
    {"k negative", {"k must have a shape", "(2, -5, 2, 8)"}, SPOIL(p.k.sizes[1] = -5)},
    {"v endless",
     {"v must have a shape", "(2, 4611686018427387904, 2, 6)"},
     SPOIL(p.v.sizes[1] = std::int64_t(1) << 62)},
    {"k on a GPU", {"k must be where q is", "CPU"}, SPOIL(p.k.device = Device::gpu)},
    {"out on a GPU", {"out must be where q is", "CPU"}, SPOIL(c.forward.out.device = Device::gpu)},
    {"lse on a GPU", {"softmax_lse must be where q is"}, SPOIL(c.forward.lse.device = Device::gpu)},
    {"scale", {"softmax_scale must be finite", "nan"}, SPOIL(p.softmax_scale = std::nan(""))},
    {"scale past fp32", {"softmax_scale must be finite", "1e+39"}, SPOIL(p.softmax_scale = 1e39)},
    {"softcap past fp32", {"softcap must be from 1e-30 to 1e30", "1e-40"}, SPOIL(p.softcap = 1e-40)},
    {"softcap too large", {"softcap must be from 1e-30 to 1e30", "1e+31"}, SPOIL(p.softcap = 1e31)},
    {"softcap", {"softcap must be finite", "inf"}, SPOIL(p.softcap = INFINITY)},
    {"softcap nan", {"softcap must be finite", "nan"}, SPOIL(p.softcap = std::nan(""))},
    {"dropout 1", {"dropout_p must be in [0, 1)", "got 1"}, SPOIL(p.dropout_p = 1.0)},
    {"dropout negative", {"dropout_p", "-0.1"}, SPOIL(p.dropout_p = -0.1)},
    {"dropout nan", {"dropout_p", "nan"}, SPOIL(p.dropout_p = std::nan(""))},
    {"softcap with dropout", {"softcap and dropout", "0.5"}, SPOIL(c.with_dropout(); p.softcap = 3.0)},
    {"rng missing", {"rng_state is missing"}, SPOIL(c.with_dropout(); p.rng_state = {})},
    {"rng dtype",
     {"rng_state must have dtype int64", "int32"},
     SPOIL(c.with_dropout(); p.rng_state.dtype = DType::i32)},
    {"rng shape", {"rng_state must have shape (2,)", "(1)"}, SPOIL(c.with_dropout(); p.rng_state.sizes[0] = 1)},
    {"rng stride", {"rng_state must be contiguous"}, SPOIL(c.with_dropout(); p.rng_state.strides[0] = 3)},
    {"alibi dtype", {"alibi_slopes must have dtype float32", "float16"}, SPOIL(p.alibi_slopes.dtype = DType::f16)},
    {"alibi shape", {"alibi_slopes must have shape (H,) = (4,)", "(3)"}, SPOIL(p.alibi_slopes.sizes[0] = 3)},
    {"alibi stride", {"alibi_slopes must have a contiguous last"}, SPOIL(p.alibi_slopes.strides[0] = 2)},
    {"out missing", {"out is missing"}, SPOIL(c.forward.out = {})},
    {"out dtype", {"out must have dtype float32", "float16"}, SPOIL(c.forward.out.dtype = DType::f16)},
    {"out shape", {"out must have shape", "(2, 3, 4, 6)", "(2, 3, 4, 5)"}, SPOIL(c.forward.out.sizes[3] = 5)},
    {"out last stride", {"out must have a contiguous last"}, SPOIL(c.forward.out.strides[3] = 2)},
    {"lse missing", {"softmax_lse is missing"}, SPOIL(c.forward.lse = {})},
    {"lse dtype", {"softmax_lse must have dtype float32"}, SPOIL(c.forward.lse.dtype = DType::f64)},
    {"lse shape", {"softmax_lse must have shape (B, H, Sq)"}, SPOIL(c.forward.lse.sizes[2] = 4)},
    {"lse strides", {"softmax_lse must be contiguous"}, SPOIL(c.forward.lse.strides[1] = 9)},
    {"dmask without dropout", {"S_dmask", "dropout_p > 0"}, SPOIL(c.forward.s_dmask = c.s_dmask.view())},
    {"dmask dtype",
     {"S_dmask must have dtype"},
     SPOIL(c.with_dropout(); c.forward.s_dmask = c.s_dmask.view(); c.forward.s_dmask.dtype = DType::f64)},
    {"dmask shape",
     {"S_dmask must have shape"},
     SPOIL(c.with_dropout(); c.forward.s_dmask = c.s_dmask.view(); c.forward.s_dmask.sizes[3] = 8)},
    {"dmask strides",
     {"S_dmask must be contiguous"},
     SPOIL(c.with_dropout(); c.forward.s_dmask = c.s_dmask.view(); c.forward.s_dmask.strides[2] = 8)},
    {"bias shape",
     {"attn_bias must have shape (B|1, H|1, Sq|1, Sk)", "(2, 1, 3, 4)"},
     SPOIL(p.attn_bias = c.bias.view(); p.attn_bias.sizes[3] = 4)},
    {"bias rows",
     {"attn_bias must have shape (B|1, H|1, Sq|1, Sk)", "(2, 1, 2, 5)"},
     SPOIL(p.attn_bias = c.bias.view(); p.attn_bias.sizes[2] = 2)},
    {"bias dtype",
     {"attn_bias must have dtype float32", "float16"},
     SPOIL(p.attn_bias = c.bias.view(); p.attn_bias.dtype = DType::f16)},
    {"bias last stride",
     {"attn_bias must have a contiguous last"},
     SPOIL(p.attn_bias = c.bias.view(); p.attn_bias.strides[3] = 2)},
    {"mask dtype", {"attn_mask must have dtype bool", "attn_bias"}, SPOIL(p.attn_mask = c.bias.view())},
    {"mask shape",
     {"attn_mask must have shape", "(4)"},
     SPOIL(p.attn_mask = c.sink.view(); p.attn_mask.dtype = DType::boolean)},
    {"bounds dtype", {"key_begin must have dtype int32"}, SPOIL(p.key_begin = c.sink.view())},
    {"bounds shape",
     {"key_end must have shape (B|1, Sq) = (2|1, 3)", "(4)"},
     SPOIL(p.key_end = c.sink.view(); p.key_end.dtype = DType::i32)},
    {"bounds batch",
     {"key_begin must have shape (B|1, Sq) = (2|1, 3)", "(3, 3)"},
     SPOIL(p.key_begin = c.bias.view(); p.key_begin.dtype = DType::i32; p.key_begin.ndim = 2;
           p.key_begin.sizes = {3, 3}; p.key_begin.strides = {3, 1})},
    {"sink stride",
     {"learnable_sink must be contiguous"},
     SPOIL(p.learnable_sink = c.sink.view(); p.learnable_sink.strides[0] = 2)},
    {"sink shape",
     {"learnable_sink must have shape (H,)", "(3)"},
     SPOIL(p.learnable_sink = c.sink.view(); p.learnable_sink.sizes[0] = 3)},
};

const Violation kPacked[] = {
    {"only cu_seqlens_q", {"cu_seqlens_k is missing"}, SPOIL(p.cu_seqlens_k = {})},
    {"only cu_seqlens_k", {"cu_seqlens_q is missing"}, SPOIL(p.cu_seqlens_q = {})},
    {"q dimensions", {"q must have 3 dimensions"}, SPOIL(p.q.ndim = 4)},
    {"cu dtype", {"cu_seqlens_q must have dtype int32", "int64"}, SPOIL(p.cu_seqlens_q.dtype = DType::i64)},
    {"cu stride", {"cu_seqlens_k must be contiguous"}, SPOIL(p.cu_seqlens_k.strides[0] = 2)},
    {"cu lengths differ", {"cu_seqlens_k must have shape", "(3)", "(2)"}, SPOIL(p.cu_seqlens_k.sizes[0] = 2)},
    {"no sequence", {"B must be positive"}, SPOIL(p.cu_seqlens_q.sizes[0] = 1)},
    {"cu start", {"cu_seqlens_q must start at 0", "1"}, SPOIL(c.cu_q[0] = 1)},
    {"cu decreases", {"cu_seqlens_k must not decrease", "index 2"}, SPOIL(c.cu_k = {0, 4, 3})},
    {"cu past the end", {"cu_seqlens_q must end within the 6 rows", "7"}, SPOIL(c.cu_q[2] = 7; p.max_seqlen_q = 9)},
    {"max_seqlen_q small", {"max_seqlen_q must be at least", "3", "4 rows"}, SPOIL(p.max_seqlen_q = 3)},
    {"max_seqlen_k negative", {"max_seqlen_k must not be negative"}, SPOIL(p.max_seqlen_k = -1)},
    {"max_seqlen_q endless", {"max_seqlen_q must be below 2^31"}, SPOIL(p.max_seqlen_q = std::int64_t(1) << 31)},
    {"seqused_k past max_seqlen_k",
     {"max_seqlen_k must be at least", "got 5", "seqused_k[1] = 6"},
     SPOIL(p.seqused_k = vector_of(&c.cu_q[1], DType::i32, 2); p.max_seqlen_k = 5)},
    {"seqused_k stride",
     {"seqused_k must be contiguous"},
     SPOIL(p.seqused_k = vector_of(&c.cu_q[0], DType::i32, 2); p.seqused_k.strides[0] = 2)},
    {"cache_batch_idx",
     {"cache_batch_idx was given with cu_seqlens"},
     SPOIL(p.cache_batch_idx = vector_of(&c.cu_q[0], DType::i32, 2))},
    {"pages without slots", {"k must have pages of at least one slot"}, SPOIL(c.with_pages(0))},
    {"block_table stride",
     {"block_table must have a contiguous last"},
     SPOIL(c.with_pages(5); p.block_table.strides = {1, 2})},
    {"no pages without memory",
     {"need 4 slots", "block_table has 0 pages of 16"},
     SPOIL(p.k.ndim = p.v.ndim = 4; p.k.sizes = {1, 16, 2, 8}; p.v.sizes = {1, 16, 2, 6}; p.k.strides[3] = 1;
           p.v.strides[3] = 1; p.block_table.ndim = 2; p.block_table.dtype = DType::i32; p.block_table.sizes = {2, 0})},
    {"pages endless",
     {"block_table must not have more slots", "(2, 4611686018427387904)", "pages of 16"},
     SPOIL(p.k.ndim = p.v.ndim = 4; p.k.sizes = {1, 16, 2, 8}; p.v.sizes = {1, 16, 2, 6}; p.k.strides[3] = 1;
           p.v.strides[3] = 1; p.block_table.ndim = 2; p.block_table.dtype = DType::i32;
           p.block_table.sizes = {2, std::int64_t(1) << 62}; p.block_table.strides = {1, 1})},
    {"k head dim", {"k must have shape (Tk, Hk, D)"}, SPOIL(p.k.sizes[2] = 9)},
    {"v rows", {"v must have shape (Tk, Hk, Dv)"}, SPOIL(p.v.sizes[0] = 9)},
    {"alibi batch",
     {"alibi_slopes must have shape", "(B, H) = (2, 4)"},
     SPOIL(p.alibi_slopes.ndim = 2; p.alibi_slopes.sizes = {3, 4}; p.alibi_slopes.strides = {4, 1})},
};

#undef SPOIL
#define SPOIL(...)        \
  [](Call& c) {           \
    auto& b = c.backward; \
    __VA_ARGS__;          \
  }

const Violation kBackward[] = {
    {"dout missing", {"dout is missing"}, SPOIL(b.dout = {})},
    {"dout dtype", {"dout must have dtype"}, SPOIL(b.dout.dtype = DType::bf16)},
    {"dout shape", {"dout must have shape"}, SPOIL(b.dout.sizes[1] = 9)},
    {"out shape", {"out must have shape"}, SPOIL(b.out.sizes[3] = 9)},
    {"lse shape", {"softmax_lse must have shape"}, SPOIL(b.lse.sizes[0] = 9)},
    {"dq shape", {"dq must have shape"}, SPOIL(b.dq.sizes[3] = 9)},
    {"dk shape", {"dk must have shape"}, SPOIL(b.dk.sizes[2] = 4)},
    {"dv dtype", {"dv must have dtype"}, SPOIL(b.dv.dtype = DType::f64)},
    {"dv stride", {"dv must have a contiguous last"}, SPOIL(b.dv.strides[3] = 2)},
    {"softmax_d shape", {"softmax_d must have shape"}, SPOIL(b.softmax_d.sizes[2] = 1)},
    {"dlse dtype", {"dlse must have dtype float32"}, SPOIL(b.dlse = b.lse; b.dlse.dtype = DType::f64)},
    {"dbias without bias", {"dbias is the gradient of attn_bias"}, SPOIL(b.dbias = c.dbias.view())},
    {"dbias shape",
     {"dbias must have the shape of attn_bias, (2, 1, 3, 5)", "(1, 1, 3, 5)"},
     SPOIL(b.problem.attn_bias = c.bias.view(); b.dbias = c.dbias.view(); b.dbias.sizes[0] = 1)},
    {"seqused_k", {"have no backward pass"}, SPOIL(b.problem.seqused_k = vector_of(&c.pages[0], DType::i32, 2))},
    {"leftpad_k", {"have no backward pass"}, SPOIL(b.problem.leftpad_k = vector_of(&c.pages[0], DType::i32, 2))},
    {"cache_batch_idx",
     {"have no backward pass"},
     SPOIL(b.problem.cache_batch_idx = vector_of(&c.pages[0], DType::i32, 2))},
    {"block_table",
     {"have no backward pass"},
     SPOIL(b.problem.block_table = vector_of(&c.pages[0], DType::i32, 2); b.problem.block_table.ndim = 2;
           b.problem.block_table.sizes = {2, 1}; b.problem.block_table.strides = {1, 1})},
    {"dbias stride",
     {"dbias must have a contiguous last"},
     SPOIL(b.problem.attn_bias = c.bias.view(); b.dbias = c.dbias.view(); b.dbias.strides[3] = 2)},
    {"dsink stride",
     {"dsink must have a contiguous last"},
     SPOIL(b.problem.learnable_sink = c.sink.view(); b.dsink = c.dsink.view(); b.dsink.strides[0] = 2)},
    {"dsink dtype",
     {"dsink must have dtype float32", "float16"},
     SPOIL(b.problem.learnable_sink = c.sink.view(); b.dsink = c.dsink.view(); b.dsink.dtype = DType::f16)},
};
#undef SPOIL

template <class Run>
void expect_error(const Violation& violation, bool packed, const Run& run) {
  Call call(packed);
  violation.spoil(call);
  const auto outputs = [&] {
    std::vector<std::vector<char>> all;
    for (const Tensor* t : {&call.out, &call.lse, &call.dq, &call.dk, &call.dv, &call.softmax_d})
      all.push_back(t->bytes());
    return all;
  };
  const auto before = outputs();
  try {
    run(call);
    FAIL() << violation.name << ": no exception";
  } catch (const Error& error) {
    for (const char* fragment : violation.fragments)
      EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos)
          << violation.name << ": \"" << fragment << "\" is not in: " << error.what();
  }
  EXPECT_EQ(outputs(), before) << violation.name;
}

TEST(Validate, DenseViolations) {
  for (const Violation& v : kDense)
    expect_error(v, false, [](Call& c) { attention_forward(c.forward, default_executor(1)); });
}

TEST(Validate, PackedViolations) {
  for (const Violation& v : kPacked)
    expect_error(v, true, [](Call& c) { attention_forward(c.forward, default_executor(1)); });
}

TEST(Validate, BackwardViolations) {
  for (const Violation& v : kBackward)
    expect_error(v, false, [](Call& c) { attention_backward(c.backward, default_executor(1)); });
}

TEST(Validate, CheckProblemRefusesWhatForwardWouldButResults) {
  const auto check = [](const Violation& v, bool packed) {
    for (const char* of_results : {"out ", "softmax_lse", "S_dmask", "rng_state is missing"})
      if (std::string(v.fragments[0]).rfind(of_results, 0) == 0) return;
    expect_error(v, packed, [](Call& c) { check_problem(c.forward.problem); });
  };
  for (const Violation& v : kDense) check(v, false);
  for (const Violation& v : kPacked) check(v, true);
}

TEST(Validate, TheUnspoiledCallsAreValid) {
  for (const bool packed : {false, true}) {
    Call call(packed);
    EXPECT_NO_THROW(validate(call.forward));
    EXPECT_NO_THROW(validate(call.backward));
    call.with_dropout();
    call.forward.s_dmask = call.s_dmask.view();
    EXPECT_NO_THROW(validate(call.forward));
    EXPECT_NO_THROW(check_problem(call.forward.problem));
  }
}

// Libraries disagree about the strides of tensors without elements.
TEST(Validate, StridesOfNothingAreOfNoMatter) {
  Call call(false);
  for (TensorView* t : {&call.backward.problem.q, &call.backward.dout, &call.backward.out, &call.backward.dq,
                        &call.backward.lse, &call.backward.softmax_d})
    t->sizes[t->ndim == 3 ? 2 : 1] = 0, t->strides = {};
  call.backward.problem.attn_bias = call.bias.view(), call.backward.dbias = call.dbias.view();
  for (TensorView* t : {&call.backward.problem.attn_bias, &call.backward.dbias})
    t->sizes[2] = 0, t->strides = {0, 0, 0, 1};
  const auto before = call.dbias.bytes();
  EXPECT_NO_THROW(attention_backward(call.backward, default_executor(1)));
  EXPECT_EQ(call.dbias.bytes(), before);
}

TEST(Validate, WindowsAreNormalised) {
  Call call(false);
  AttentionProblem& p = call.forward.problem;
  p.window_left = 7, p.window_right = -9;
  EXPECT_EQ(validate(p).window_left, -1);  // 7 >= Sk = 5
  EXPECT_EQ(validate(p).window_right, -1);
  p.window_right = 5;
  EXPECT_EQ(validate(p).window_right, -1);
  p.window_right = 4;  // Hides keys where queries are more.
  EXPECT_EQ(validate(p).window_right, 4);
  p.window_left = 2, p.window_right = 3, p.causal = true;
  EXPECT_EQ(validate(p).window_left, 2);
  EXPECT_EQ(validate(p).window_right, 0);
}

// One element is not followed by another.
TEST(Validate, StridesOfOneElementAreOfNoMatter) {
  TensorView t = vector_of(nullptr, DType::f32, 1);
  t.strides[0] = 7;
  EXPECT_NO_THROW(check_contiguous("t", t));
  EXPECT_NO_THROW(check_last_stride("t", t));
}

TEST(Validate, ScalarsOfFp64HaveItsRange) {
  Call call(false);
  AttentionProblem& p = call.forward.problem;
  p.q.dtype = p.k.dtype = p.v.dtype = DType::f64;
  p.softmax_scale = 1e39, p.softcap = 1e-40;
  EXPECT_NO_THROW(validate(p));
}

TEST(Validate, NegativeSoftcapsAreNone) {
  Call call(false);
  call.forward.problem.softcap = -2.0;
  EXPECT_EQ(validate(call.forward).problem.softcap, 0.0);
}

TEST(Validate, MaxSeqlensAreUpperBounds) {
  Call call(true);
  AttentionProblem& p = call.forward.problem;
  p.max_seqlen_q = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(validate(p).Sq, p.max_seqlen_q);
  // Of the keys that are used, where fewer are than there is room for; whatever room pages have.
  std::vector<std::int32_t> used{4, 5};
  p.seqused_k = vector_of(used.data(), DType::i32, 2), p.max_seqlen_k = 5;
  EXPECT_EQ(validate(p).Sk, 5);
  call.with_pages(4);
  EXPECT_EQ(validate(p).Sk, 5);
}

}  // namespace
}  // namespace flash_attn::testing
