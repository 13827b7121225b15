// Rotation against multiplication of complex numbers in double precision.
#include "flash_attn/rotary.h"

#include <gtest/gtest.h>

#include <complex>
#include <cstring>
#include <functional>
#include <limits>
#include <ostream>

#include "attention_reference.h"

namespace flash_attn::testing {
namespace {

constexpr std::int64_t B = 3, S = 21, H = 2, D = 150, kPositions = 40;

template <class Int>
TensorView vector_of(std::vector<Int>& values) {
  TensorView v;
  v.data = values.data();
  v.dtype = sizeof(Int) == 4 ? DType::i32 : DType::i64;
  v.ndim = 1;
  v.sizes[0] = static_cast<std::int64_t>(values.size());
  v.strides[0] = 1;
  return v;
}

struct Case {
  DType dtype = DType::f32, table_dtype = DType::f32;
  std::int64_t half = 75;
  bool interleaved = false, conjugate = false, in_place = false, packed = false;
  std::int64_t offset = 0;
  std::vector<std::int64_t> offsets;  // The last of them names no row of the tables.
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << to_string(c.dtype) << " tables " << to_string(c.table_dtype) << " half " << c.half << " interleaved "
             << c.interleaved << " conjugate " << c.conjugate << " in place " << c.in_place << " packed " << c.packed
             << " offset " << c.offset << " offsets " << !c.offsets.empty();
}

// The same numbers each time, from the n-th on, since drawing them takes longer than all else.
Tensor filled(const std::vector<std::int64_t>& shape, DType dtype, std::int64_t n) {
  static const std::vector<double> numbers = [] {
    std::mt19937 generator(11);
    return Tensor::random({B * S * H * D + kPositions * D}, DType::f64, generator).values();
  }();
  Tensor t(shape, dtype);
  for (std::int64_t i = 0; i < t.size(); ++i) t.set(i, numbers[n + i]);
  return t;
}

struct Rotation {
  Case c;
  // Packed: three sequences, the middle one empty, and 10 rows behind them.
  std::vector<std::int32_t> cu_seqlens{0, 21, 21, 53};
  Tensor x, cos, sin, out;
  std::vector<double> before;
  RotaryArgs args;

  explicit Rotation(const Case& chosen) : c(chosen) {
    const std::vector<std::int64_t> shape =
        c.packed ? std::vector<std::int64_t>{B * S, H, D} : std::vector<std::int64_t>{B, S, H, D};
    x = filled(shape, c.dtype, 0);
    out = Tensor(shape, c.dtype);
    cos = filled({kPositions, c.half}, c.table_dtype, x.size());
    sin = filled({kPositions, c.half}, c.table_dtype, x.size() + cos.size());
    before = x.values();
    args.x = x.view(), args.cos = cos.view(), args.sin = sin.view();
    args.out = c.in_place ? args.x : out.view();
    args.offset = c.offset;
    if (!c.offsets.empty()) args.offsets = vector_of(c.offsets);
    if (c.packed) args.cu_seqlens = vector_of(cu_seqlens), args.max_seqlen = 32;
    args.interleaved = c.interleaved, args.conjugate = c.conjugate;
  }
  const Tensor& result() const { return c.in_place ? x : out; }

  // Of row n of all, or -1.
  std::int64_t position(std::int64_t n) const {
    if (c.packed && n >= cu_seqlens.back()) return -1;
    const std::int64_t b = !c.packed ? n / S : n < cu_seqlens[1] ? 0 : 2;
    const std::int64_t p = n - (c.packed ? cu_seqlens[b] : b * S) + c.offset + (c.offsets.empty() ? 0 : c.offsets[b]);
    return p < kPositions ? p : -1;
  }
  std::vector<double> expected() const {
    std::vector<double> y = before;
    for (std::int64_t head = 0; head < B * S * H; ++head) {
      const std::int64_t p = position(head / H);
      for (std::int64_t i = 0; p >= 0 && i < c.half; ++i) {
        const std::int64_t a = head * D + (c.interleaved ? 2 * i : i), b = a + (c.interleaved ? 1 : c.half);
        const std::complex<double> factor(cos.get(p * c.half + i), (c.conjugate ? -1 : 1) * sin.get(p * c.half + i));
        const std::complex<double> turned = std::complex<double>(before[a], before[b]) * factor;
        y[a] = turned.real(), y[b] = turned.imag();
      }
    }
    return y;
  }
};

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64: return 1e-14;
    case DType::f32: return 1e-6;
    case DType::f16: return 1e-3;
    default: return 8e-3;
  }
}

// In every instruction set; their bits are those of the first.
void check(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c);
  Rotation r(c);
  apply_rotary(r.args, default_executor(2));
  for (const std::string& isa : cpu_instruction_sets()) {
    force_cpu_instruction_set(isa);
    Rotation other(c);
    apply_rotary(other.args, default_executor(2));
    EXPECT_EQ(other.result().bytes(), r.result().bytes()) << isa;
  }
  force_cpu_instruction_set("");
  const std::vector<double> expected = r.expected();
  for (std::int64_t n = 0; n < r.result().size(); ++n)
    ASSERT_NEAR(r.result().get(n), expected[n], tolerance(c.dtype) * (1 + std::abs(expected[n]))) << "element " << n;
  if (!c.in_place) {
    EXPECT_EQ(r.x.values(), r.before);
  }
}

TEST(Rotary, MatchesComplexMultiplication) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
    for (const int flags : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
      for (const std::int64_t half : {0, 8, 75}) {
        Case c{dtype, dtype, half, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0, 0, {}};
        check(c);
        c.offset = 8;
        check(c);
        c.offsets = {3, 0, std::int64_t(1) << 40};
        check(c);
      }
}

TEST(Rotary, TablesMayBeOfAnyDtype) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
    for (const DType table : {DType::f32, DType::f16, DType::bf16, DType::f64}) {
      Case c;
      c.dtype = dtype, c.table_dtype = table;
      check(c);
    }
}

TEST(Rotary, NumbersOfAnyOffsetAreSafe) {
  Case c;
  const std::int64_t far = std::numeric_limits<std::int64_t>::max();
  c.offset = 8, c.offsets = {far, -far - 1, -20};
  Rotation r(c);
  apply_rotary(r.args, default_executor(2));
  for (std::int64_t n = 0; n < 2 * S * H * D; ++n) ASSERT_EQ(r.out.get(n), r.before[n]);
  // Of the last sequence, rows from 12 on are at positions from 0 on.
  for (std::int64_t n = 2 * S * H * D; n < (2 * S + 12) * H * D; ++n) ASSERT_EQ(r.out.get(n), r.before[n]);
  EXPECT_NE(r.out.get((2 * S + 12) * H * D), r.before[(2 * S + 12) * H * D]);
}

TEST(Rotary, StridedTensorsAndTablesAreRotatedWhereTheyLie) {
  Case c;
  c.half = 8;
  Rotation whole(c), r(c);
  apply_rotary(whole.args, default_executor(1));
  // x as a part of a tensor whose heads lie before its rows, and a table as columns of a wider one.
  Tensor heads({B, H, S, D + 3}, DType::f32), wide({kPositions, 2 * c.half}, DType::f32);
  const std::vector<char> poison = heads.bytes();
  TensorView view = heads.view();
  view.sizes = {B, S, H, D};
  view.strides = {H * S * (D + 3), D + 3, S * (D + 3), 1};
  const auto at = [&](std::int64_t n) {
    return ((n / D / H / S * H + n / D % H) * S + n / D / H % S) * (D + 3) + n % D;
  };
  for (std::int64_t n = 0; n < r.x.size(); ++n) heads.set(at(n), r.before[n]);
  for (std::int64_t n = 0; n < kPositions * c.half; ++n) wide.set(n / c.half * 2 * c.half + n % c.half, r.cos.get(n));
  r.args.x = view;
  r.args.cos = wide.view(), r.args.cos.sizes[1] = c.half;
  apply_rotary(r.args, default_executor(2));
  EXPECT_EQ(r.out.bytes(), whole.out.bytes());
  r.args.out = view;
  apply_rotary(r.args, default_executor(2));
  for (std::int64_t n = 0; n < r.x.size(); ++n) ASSERT_EQ(heads.get(at(n)), whole.out.get(n));
  for (std::int64_t n = 0; n < heads.size(); ++n)
    if (n % (D + 3) >= D) {
      ASSERT_EQ(std::memcmp(&heads.bytes()[4 * n], &poison[4 * n], 4), 0);
    }
}

// A dimension of one element has no stride: in place, x and out may say what they like.
TEST(Rotary, StridesOfOneElementAreOfNoMatter) {
  Case c;
  c.in_place = true;
  Rotation whole(c), r(c);
  for (TensorView* t : {&whole.args.x, &whole.args.out, &r.args.x, &r.args.out}) t->sizes[0] = 1;
  r.args.out.strides[0] = 7;
  apply_rotary(whole.args, default_executor(1));
  apply_rotary(r.args, default_executor(1));
  EXPECT_EQ(r.x.bytes(), whole.x.bytes());
}

// Whichever rows a task begins with: packed sequences of one row each are a batch of them.
TEST(Rotary, TasksBeginWithAnyRowOfASequence) {
  Case c;
  Rotation dense(c);
  c.packed = true;
  Rotation packed(c);
  std::vector<std::int32_t> cu_seqlens{0};
  std::vector<std::int64_t> offsets;
  for (std::int32_t n = 0; n < B * S; ++n) cu_seqlens.push_back(n + 1), offsets.push_back(n * 7 % kPositions);
  packed.args.cu_seqlens = vector_of(cu_seqlens), packed.args.max_seqlen = 1;
  for (TensorView* t : {&dense.args.x, &dense.args.out}) t->sizes = {B * S, 1, H, D}, t->strides = {H * D, H * D, D, 1};
  for (Rotation* r : {&packed, &dense}) {
    r->args.offsets = vector_of(offsets);
    apply_rotary(r->args, default_executor(2));
  }
  EXPECT_EQ(packed.out.bytes(), dense.out.bytes());
}

TEST(Rotary, DoesNotDependOnThreads) {
  for (const bool packed : {false, true}) {
    Case c;
    c.packed = packed;
    Rotation one(c), many(c);
    apply_rotary(one.args, default_executor(1));
    apply_rotary(many.args, default_executor(5));
    EXPECT_EQ(one.out.bytes(), many.out.bytes());
  }
}

TEST(Rotary, EmptyTensorsAreNothingToDo) {
  for (int d = 0; d < 3; ++d) {
    Rotation r({});
    r.args.x.sizes[d] = r.args.out.sizes[d] = 0;
    apply_rotary(r.args, default_executor(2));
    EXPECT_EQ(r.out.bytes(), Tensor({B, S, H, D}, DType::f32).bytes());
  }
}

struct Bad {
  const char* says;
  bool packed;
  std::function<void(Rotation&)> spoil;
};

TEST(Rotary, BadCallsWriteNothing) {
  const std::vector<Bad> bad = {
      {"x must have shape (B, S, H, D)", false, [](Rotation& r) { r.args.x.ndim = 3; }},
      {"x must have shape (T, H, D)", true, [](Rotation& r) { r.args.x.ndim = 4; }},
      {"x must be float16", false, [](Rotation& r) { r.args.x.dtype = DType::i32; }},
      {"x must have a contiguous last dimension", false, [](Rotation& r) { r.args.x.strides[3] = 2; }},
      {"out is missing", false, [](Rotation& r) { r.args.out = {}; }},
      {"out must have dtype float32", false, [](Rotation& r) { r.args.out.dtype = DType::f64; }},
      {"out must have a contiguous last dimension", false, [](Rotation& r) { r.args.out.strides[3] = 2; }},
      {"out must have the shape of x", false, [](Rotation& r) { r.args.out.sizes[0] = 1; }},
      {"stride 0 in dimension 2", false, [](Rotation& r) { r.args.out.strides[2] = 0; }},
      {"out is at the address of x", false, [](Rotation& r) { r.args.out = r.args.x, r.args.out.strides[0] += 2; }},
      {"cos must have shape", false, [](Rotation& r) { r.args.cos = {}; }},
      {"sin must have shape", false, [](Rotation& r) { r.args.sin.sizes[1] = 3; }},
      {"sin must have shape", false, [](Rotation& r) { r.args.sin.sizes[0] = 3; }},
      {"sin must have a contiguous last dimension", false, [](Rotation& r) { r.args.sin.strides[1] = 2; }},
      {"cos must be float16", false, [](Rotation& r) { r.args.cos.dtype = DType::i64; }},
      {"got rotary_dim = 152", false, [](Rotation& r) { r.args.cos.sizes[1] = r.args.sin.sizes[1] = 76; }},
      {"offset must be at least 0", false, [](Rotation& r) { r.args.offset = -1; }},
      {"offset is 20, the length of x is 21 and cos has 40 rows", false, [](Rotation& r) { r.args.offset = 20; }},
      {"offset is 9, max_seqlen is 32", true, [](Rotation& r) { r.args.offset = 9; }},
      {"offset is 9223372036854775807", false,
       [](Rotation& r) { r.args.offset = std::numeric_limits<std::int64_t>::max(); }},
      {"max_seqlen must be at least the longest sequence", true, [](Rotation& r) { r.args.max_seqlen = 31; }},
      {"max_seqlen must not be negative", true, [](Rotation& r) { r.args.max_seqlen = -1; }},
      {"cu_seqlens must start at 0", true, [](Rotation& r) { r.cu_seqlens[0] = 1; }},
      {"cu_seqlens must not decrease", true, [](Rotation& r) { r.cu_seqlens[2] = 20; }},
      {"cu_seqlens must end within the 63 rows of x", true, [](Rotation& r) { r.cu_seqlens = {0, 21, 32, 64}; }},
      {"cu_seqlens must have dtype", true, [](Rotation& r) { r.args.cu_seqlens.dtype = DType::f32; }},
      {"cu_seqlens must have shape", true, [](Rotation& r) { r.args.cu_seqlens.sizes[0] = 1; }},
      {"cu_seqlens must be contiguous", true, [](Rotation& r) { r.args.cu_seqlens.strides[0] = 2; }},
      {"offsets must have shape (B,) = (3)", false, [](Rotation& r) { r.args.offsets = vector_of(r.cu_seqlens); }},
      {"offsets must have one dimension", false,
       [](Rotation& r) { r.args.offsets = vector_of(r.cu_seqlens), r.args.offsets.ndim = 2; }},
      {"does not support apply_rotary", false, [](Rotation& r) { r.args.x.device = Device::gpu; }},
  };
  for (const auto& [says, packed, spoil] : bad) {
    Case c;
    c.packed = packed;
    Rotation r(c);
    spoil(r);
    const std::vector<char> out = r.out.bytes();
    try {
      apply_rotary(r.args, default_executor(2));
      ADD_FAILURE() << "accepted: " << says;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what() << " instead of: " << says;
    }
    EXPECT_EQ(r.out.bytes(), out);
    EXPECT_EQ(r.x.values(), r.before);
  }
}

}  // namespace
}  // namespace flash_attn::testing
