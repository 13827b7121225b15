#include "core/score_arguments.h"

#include "core/checks.h"

namespace flash_attn {
namespace {

// The stride with which a dimension of that size is read, 0 where one entry holds for all.
index_t broadcast_stride(const TensorView& t, int d) { return t.sizes[d] == 1 ? 0 : t.strides[d]; }

bool fits(std::int64_t size, index_t full) { return size == full || size == 1; }

void check_dtype_of_q_or_f32(const char* name, const TensorView& t, const Problem& p) {
  if (t.dtype != p.dtype && t.dtype != DType::f32)
    fail(name, " must have dtype ", to_string(p.dtype), " (that of q) or float32, got ", to_string(t.dtype));
}

void resolve_bias(const TensorView& t, Problem& p) {
  if (!t.given()) return;
  check_dtype_of_q_or_f32("attn_bias", t, p);
  const bool fitting =
      t.ndim == 4 && fits(t.sizes[0], p.B) && fits(t.sizes[1], p.H) && fits(t.sizes[2], p.Sq) && t.sizes[3] == p.Sk;
  if (!fitting)
    fail("attn_bias must have shape (B|1, H|1, ", p.varlen ? "max_seqlen_q|1, max_seqlen_k" : "Sq|1, Sk", ") = (", p.B,
         "|1, ", p.H, "|1, ", p.Sq, "|1, ", p.Sk, "), got ", shape_of(t));
  check_last_stride("attn_bias", t);
  p.bias = {t.data, t.dtype, broadcast_stride(t, 0), broadcast_stride(t, 1), broadcast_stride(t, 2), 1};
}

void resolve_mask(const TensorView& t, Problem& p) {
  if (!t.given()) return;
  if (t.dtype != DType::boolean)
    fail("attn_mask must have dtype bool, True where a key is kept, got ", to_string(t.dtype),
         "; numbers that are added to scores go into attn_bias");
  const int rows = t.ndim - 2, keys = t.ndim - 1;
  const bool fitting = t.ndim >= 2 && t.ndim <= 4 && fits(t.sizes[0], p.B) && fits(t.sizes[keys], p.Sk) &&
                       (t.ndim < 3 || fits(t.sizes[rows], p.Sq)) && (t.ndim < 4 || fits(t.sizes[1], p.H));
  if (!fitting)
    fail("attn_mask must have shape (B, Sk), (B, Sq, Sk) or (B, H, Sq, Sk) with B = ", p.B, ", H = ", p.H,
         ", Sq = ", p.Sq, ", Sk = ", p.Sk, p.varlen ? " (max_seqlen_q and max_seqlen_k)" : "",
         ", or 1 in place of any, got ", shape_of(t));
  p.mask = {t.data,
            t.dtype,
            broadcast_stride(t, 0),
            t.ndim == 4 ? broadcast_stride(t, 1) : 0,
            t.ndim >= 3 ? broadcast_stride(t, rows) : 0,
            broadcast_stride(t, keys)};
}

void resolve_bound(const char* name, const TensorView& t, const Problem& p, BoundTable& bound) {
  if (!t.given()) return;
  check_dtype(name, t, DType::i32, "");
  const int rows = t.ndim - 1;
  const index_t length = p.varlen ? p.Tq : p.Sq;
  const bool fitting =
      t.sizes[rows] == length && (p.varlen ? t.ndim == 1 || (t.ndim == 2 && fits(t.sizes[0], p.H))
                                           : (t.ndim == 2 && fits(t.sizes[0], p.B)) ||
                                                 (t.ndim == 3 && fits(t.sizes[0], p.B) && fits(t.sizes[1], p.H)));
  if (!fitting) {
    if (p.varlen)
      fail(name, " must have shape (Tq,) = (", p.Tq, ",) or (H|1, Tq) = (", p.H, "|1, ", p.Tq, "), got ", shape_of(t));
    fail(name, " must have shape (B|1, Sq) = (", p.B, "|1, ", p.Sq, ") or (B|1, H|1, Sq) = (", p.B, "|1, ", p.H, "|1, ",
         p.Sq, "), got ", shape_of(t));
  }
  bound.data = static_cast<const std::int32_t*>(t.data);
  bound.batch_stride = p.varlen ? 0 : broadcast_stride(t, 0);
  bound.head_stride = rows >= (p.varlen ? 1 : 2) ? broadcast_stride(t, rows - 1) : 0;
  bound.row_stride = t.strides[rows];
}

void resolve_sink(const TensorView& t, Problem& p) {
  if (!t.given()) return;
  check_dtype_of_q_or_f32("learnable_sink", t, p);
  check_shape("learnable_sink", t, {p.H}, "(H,)");
  check_contiguous("learnable_sink", t);
  p.sink = t.data;
  p.sink_dtype = t.dtype;
}

// A gradient has the dtype and shape of what it belongs to.
void check_like(const char* name, const TensorView& t, const char* of, const TensorView& like) {
  if (!like.given()) fail(name, " is the gradient of ", of, ", which was not passed; leave it out");
  check_dtype(name, t, like.dtype, (std::string(" (that of ") + of + ")").c_str());
  bool same = t.ndim == like.ndim;
  for (int d = 0; d < t.ndim; ++d) same = same && t.sizes[d] == like.sizes[d];
  if (!same) fail(name, " must have the shape of ", of, ", ", shape_of(like), ", got ", shape_of(t));
  check_last_stride(name, t);
}

}  // namespace

void resolve_score_arguments(const AttentionProblem& r, Problem& p) {
  resolve_bias(r.attn_bias, p);
  resolve_mask(r.attn_mask, p);
  resolve_bound("key_begin", r.key_begin, p, p.key_begin);
  resolve_bound("key_end", r.key_end, p, p.key_end);
  resolve_sink(r.learnable_sink, p);
}

void resolve_score_gradients(const BackwardArgs& args, BackwardProblem& b) {
  if (args.dbias.given()) {
    const TensorView& t = args.dbias;
    check_like("dbias", t, "attn_bias", args.problem.attn_bias);
    // Strides of a table without elements say nothing; none is written.
    if (!has_no_elements(t))
      b.dbias = {t.data, t.dtype, broadcast_stride(t, 0), broadcast_stride(t, 1), broadcast_stride(t, 2), 1};
  }
  if (args.dsink.given()) {
    check_like("dsink", args.dsink, "learnable_sink", args.problem.learnable_sink);
    b.dsink = args.dsink.data;
  }
}

}  // namespace flash_attn
