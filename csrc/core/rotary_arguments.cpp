#include "core/checks.h"
#include "core/key_storage.h"
#include "core/rotary.h"
#include "core/validate.h"

namespace flash_attn {
namespace {

void check_integers(const char* name, const TensorView& t) {
  if (t.dtype != DType::i32 && t.dtype != DType::i64)
    fail(name, " must have dtype int32 or int64, got ", to_string(t.dtype));
  if (t.ndim != 1) fail(name, " must have one dimension, got shape ", shape_of(t));
  check_contiguous(name, t);
}

void resolve_x(const RotaryArgs& args, RotaryProblem& r) {
  const TensorView& x = args.x;
  const bool packed = args.cu_seqlens.given();
  const int ndim = packed ? 3 : 4;
  const char* const letters = packed ? "(T, H, D), as cu_seqlens is given" : "(B, S, H, D)";
  if (x.ndim != ndim) fail("x must have shape ", letters, ", got ", shape_of(x));
  if (!is_floating(x.dtype)) fail("x must be float16, bfloat16, float32 or float64, got ", to_string(x.dtype));
  check_last_stride("x", x);
  r.dtype = x.dtype;
  r.device = x.device;
  r.B = packed ? 1 : x.sizes[0];
  r.rows = x.sizes[ndim - 3];
  r.H = x.sizes[ndim - 2];
  r.D = x.sizes[ndim - 1];
  r.x = operand(x);
}

void resolve_out(const RotaryArgs& args, RotaryProblem& r) {
  const TensorView &x = args.x, &out = args.out;
  if (!out.given()) fail("out is missing; pass x itself to rotate in place, or a tensor of its shape");
  check_dtype("out", out, r.dtype, " (that of x)");
  if (out.ndim != x.ndim || out.sizes != x.sizes)
    fail("out must have the shape of x, ", shape_of(x), ", got ", shape_of(out));
  check_last_stride("out", out);
  const bool empty = has_no_elements(out);  // of any strides, and all of them at one address
  for (int d = 0; d < out.ndim && !empty; ++d) {
    if (out.sizes[d] > 1 && out.strides[d] == 0)
      fail("out must have an element of its own for every result, got stride 0 in dimension ", d, " of shape ",
           shape_of(out), "; pass a copy");
    if (out.data == x.data && out.sizes[d] > 1 && out.strides[d] != x.strides[d])
      fail("out is at the address of x and must then have its strides, ", list(x.strides.data(), x.ndim), ", got ",
           list(out.strides.data(), out.ndim));
  }
  r.out = operand(out);
}

// Which sequences there are. Returns the length that the tables must cover.
index_t resolve_sequences(const RotaryArgs& args, RotaryProblem& r) {
  const TensorView& cu = args.cu_seqlens;
  if (!cu.given()) return r.rows;
  check_integers("cu_seqlens", cu);
  if (cu.sizes[0] < 2) fail("cu_seqlens must have shape (B + 1,) with B of at least 1, got ", shape_of(cu));
  if (args.max_seqlen < 0) fail("max_seqlen must not be negative, got ", args.max_seqlen);
  r.cu_seqlens = Integers(cu);
  if (r.device == Device::cpu) check_lengths("cu_seqlens", r.cu_seqlens, r.rows, "x", args.max_seqlen, "max_seqlen");
  return args.max_seqlen;
}

void resolve_offsets(const RotaryArgs& args, index_t length, const char* length_name, RotaryProblem& r) {
  const index_t positions = r.rotary.positions;
  if (args.offset < 0) fail("offset must be at least 0, got ", args.offset);
  if (length > positions || args.offset > positions - length)
    fail("cos must have a row for each position: offset is ", args.offset, ", ", length_name, " is ", length,
         " and cos has ", positions, " rows; build longer tables");
  r.offset = args.offset;
  if (!args.offsets.given()) return;
  const index_t sequences = r.cu_seqlens.given() ? r.cu_seqlens.size() - 1 : r.B;
  check_integers("offsets", args.offsets);
  check_shape("offsets", args.offsets, {sequences}, "(B,)");
  r.offsets = Integers(args.offsets);
}

}  // namespace

Rotary resolve_rotary_tables(const char* cos_name, const TensorView& cos, const char* sin_name, const TensorView& sin,
                             index_t D) {
  for (const auto& [name, t] : {std::pair(cos_name, &cos), std::pair(sin_name, &sin)}) {
    if (t->ndim != 2 || t->sizes[0] != cos.sizes[0] || t->sizes[1] != cos.sizes[1])
      fail(name, " must have shape (positions, rotary_dim / 2), the same for ", cos_name, " and ", sin_name, ", got ",
           shape_of(*t));
    if (!is_floating(t->dtype)) fail(name, " must be float16, bfloat16, float32 or float64, got ", to_string(t->dtype));
    check_last_stride(name, *t);
  }
  if (cos.sizes[1] > D / 2)
    fail(cos_name, " must rotate at most the D = ", D, " features of a head, got rotary_dim = ", 2 * cos.sizes[1]);
  return {
      {cos.data, cos.dtype, cos.strides[0]}, {sin.data, sin.dtype, sin.strides[0]}, cos.sizes[0], cos.sizes[1], true};
}

RotaryProblem validate(const RotaryArgs& args) {
  RotaryProblem r;
  resolve_x(args, r);
  resolve_out(args, r);
  r.rotary = resolve_rotary_tables("cos", args.cos, "sin", args.sin, r.D);
  r.rotary.interleaved = args.interleaved;
  r.rotary.conjugate = args.conjugate;
  const index_t length = resolve_sequences(args, r);
  resolve_offsets(args, length, args.cu_seqlens.given() ? "max_seqlen" : "the length of x", r);
  return r;
}

}  // namespace flash_attn
