#include "core/validate.h"

#include <cmath>
#include <limits>

#include "core/checks.h"
#include "core/key_storage.h"
#include "core/score_arguments.h"

namespace flash_attn {
namespace {

void check_input(const char* name, const TensorView& t, const TensorView& q, int ndim, const char* letters) {
  if (!t.given()) fail(name, " is missing; pass a tensor of shape ", letters);
  if (t.ndim != ndim) fail(name, " must have ", ndim, " dimensions ", letters, ", got shape ", shape_of(t));
  check_dtype(name, t, q.dtype, " (that of q)");
  check_device(name, t, q.device);
  check_sizes(name, t);
  check_last_stride(name, t);
}

// A tensor that the problem's sizes determine: dout, out, dq, dk, dv.
void check_related(const char* name, const TensorView& t, const Problem& p, bool query_rows, index_t heads,
                   index_t features, const char* dense_letters, const char* packed_letters) {
  const char* letters = p.varlen ? packed_letters : dense_letters;
  if (!t.given()) fail(name, " is missing; pass a tensor of shape ", letters);
  check_dtype(name, t, p.dtype, " (that of q)");
  check_device(name, t, p.device);
  if (p.varlen)
    check_shape(name, t, {query_rows ? p.Tq : p.Tk, heads, features}, letters);
  else
    check_shape(name, t, {p.B, query_rows ? p.Sq : p.Sk, heads, features}, letters);
  check_last_stride(name, t);
}

void check_lse_shaped(const char* name, const TensorView& t, const Problem& p) {
  if (!t.given()) fail(name, " is missing; pass a tensor of shape ", p.varlen ? "(H, Tq)" : "(B, H, Sq)");
  check_dtype(name, t, lse_dtype(p.dtype), p.dtype == DType::f64 ? " (q is float64)" : "");
  check_device(name, t, p.device);
  if (p.varlen)
    check_shape(name, t, {p.H, p.Tq}, "(H, Tq)");
  else
    check_shape(name, t, {p.B, p.H, p.Sq}, "(B, H, Sq)");
  check_contiguous(name, t);
}

void check_head_dim(const char* letter, const char* name, std::int64_t size) {
  if (size < 1 || size > kMaxHeadDim)
    fail("head dim ", letter, " of ", name, " must be from 1 to ", kMaxHeadDim, ", got ", size);
}

void check_cu_seqlens(const char* name, const TensorView& t) {
  if (!t.given())
    fail(name, " is missing; varlen needs both cu_seqlens_q and cu_seqlens_k, int32 tensors of shape (B + 1,)");
  check_dtype(name, t, DType::i32, "");
  if (t.ndim != 1 || t.sizes[0] < 1) fail(name, " must have shape (B + 1,), got ", shape_of(t));
  check_contiguous(name, t);
}

// cu_seqlens are 32-bit numbers, and so is what they bound.
void check_longest(const char* name, std::int64_t rows) {
  if (rows < 0) fail(name, " must not be negative, got ", rows);
  if (rows > std::numeric_limits<std::int32_t>::max()) fail(name, " must be below 2^31, got ", rows);
}

// Arithmetic on scores is in fp32, or in fp64 where q is.
void check_scalars(const AttentionProblem& r) {
  const double most = r.q.dtype == DType::f64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  if (!(std::abs(r.softmax_scale) <= most)) fail("softmax_scale must be finite, got ", r.softmax_scale);
  if (std::isnan(r.softcap) || std::isinf(r.softcap))
    fail("softcap must be finite (0 or less: no softcap), got ", r.softcap);
  if (r.q.dtype != DType::f64 && r.softcap > 0.0 && !(r.softcap >= 1e-30 && r.softcap <= 1e30))
    fail("softcap must be from 1e-30 to 1e30, or 0 for none, got ", r.softcap);
  if (!(r.dropout_p >= 0.0 && r.dropout_p < 1.0)) fail("dropout_p must be in [0, 1), got ", r.dropout_p);
  if (r.softcap > 0.0 && r.dropout_p > 0.0)
    fail("softcap and dropout are not supported together, got softcap = ", r.softcap, " and dropout_p = ", r.dropout_p,
         "; set one of them to 0");
}

void resolve_dense(const AttentionProblem& r, const KeyNames& names, Problem& p) {
  const bool paged = r.block_table.given();
  const char* const k_shape = paged ? "(num_pages, page, Hk, D)" : "(B, Sk, Hk, D)";
  const char* const v_shape = paged ? "(num_pages, page, Hk, Dv)" : "(B, Sk, Hk, Dv)";
  if (r.q.ndim != 4) fail("q must have 4 dimensions (B, Sq, H, D), got shape ", shape_of(r.q));
  check_last_stride("q", r.q);
  check_input(names.k, r.k, r.q, 4, k_shape);
  check_input(names.v, r.v, r.q, 4, v_shape);
  p.B = r.q.sizes[0];
  p.Sq = r.q.sizes[1];
  p.H = r.q.sizes[2];
  p.D = r.q.sizes[3];
  p.Sk = r.k.sizes[1];
  p.Hk = r.k.sizes[2];
  p.Dv = r.v.sizes[3];
  p.Tq = p.B * p.Sq;
  p.Tk = p.B * p.Sk;
  const index_t batches = paged || r.cache_batch_idx.given() ? r.k.sizes[0] : p.B;
  check_shape(names.k, r.k, {batches, p.Sk, p.Hk, p.D}, k_shape);
  check_shape(names.v, r.v, {batches, p.Sk, p.Hk, p.Dv}, v_shape);
  if (p.B < 1) fail("batch size B must be positive, got q of shape ", shape_of(r.q));
}

void resolve_varlen(const AttentionProblem& r, Problem& p) {
  p.varlen = true;
  const bool paged = r.block_table.given();
  const char* const k_shape = paged ? "(num_pages, page, Hk, D)" : "(Tk, Hk, D)";
  const char* const v_shape = paged ? "(num_pages, page, Hk, Dv)" : "(Tk, Hk, Dv)";
  if (r.q.ndim != 3) fail("q must have 3 dimensions (Tq, H, D) when cu_seqlens are given, got shape ", shape_of(r.q));
  check_last_stride("q", r.q);
  check_input("k", r.k, r.q, paged ? 4 : 3, k_shape);
  check_input("v", r.v, r.q, paged ? 4 : 3, v_shape);
  check_cu_seqlens("cu_seqlens_q", r.cu_seqlens_q);
  check_cu_seqlens("cu_seqlens_k", r.cu_seqlens_k);
  p.B = r.cu_seqlens_q.sizes[0] - 1;
  if (p.B < 1) fail("batch size B must be positive, got cu_seqlens_q of shape ", shape_of(r.cu_seqlens_q));
  check_shape("cu_seqlens_k", r.cu_seqlens_k, {p.B + 1}, "(B + 1,)");
  p.Tq = r.q.sizes[0];
  p.H = r.q.sizes[1];
  p.D = r.q.sizes[2];
  p.Tk = r.k.sizes[0];
  p.Hk = r.k.sizes[r.k.ndim - 2];
  p.Dv = r.v.sizes[r.v.ndim - 1];
  if (paged) {
    check_shape("k", r.k, {p.Tk, r.k.sizes[1], p.Hk, p.D}, k_shape);
    check_shape("v", r.v, {p.Tk, r.k.sizes[1], p.Hk, p.Dv}, v_shape);
  } else {
    check_shape("k", r.k, {p.Tk, p.Hk, p.D}, k_shape);
    check_shape("v", r.v, {p.Tk, p.Hk, p.Dv}, v_shape);
  }
  check_longest("max_seqlen_q", r.max_seqlen_q);
  check_longest("max_seqlen_k", r.max_seqlen_k);
  p.Sq = r.max_seqlen_q;
  p.Sk = r.max_seqlen_k;
  if (p.device == Device::cpu) {
    check_lengths("cu_seqlens_q", Integers(r.cu_seqlens_q), p.Tq, "q", p.Sq, "max_seqlen_q");
    // Pages hold what cu_seqlens_k counts elsewhere; seqused_k replaces its lengths.
    const index_t any = std::numeric_limits<std::int32_t>::max();
    check_lengths("cu_seqlens_k", Integers(r.cu_seqlens_k), paged ? any : p.Tk, "k", r.seqused_k.given() ? any : p.Sk,
                  "max_seqlen_k");
  }
  p.cu_seqlens_q = static_cast<const std::int32_t*>(r.cu_seqlens_q.data);
  p.cu_seqlens_k = static_cast<const std::int32_t*>(r.cu_seqlens_k.data);
}

void resolve_alibi(const AttentionProblem& r, Problem& p) {
  const TensorView& slopes = r.alibi_slopes;
  if (!slopes.given()) return;
  check_dtype("alibi_slopes", slopes, DType::f32, "");
  const bool per_head = slopes.ndim == 1 && slopes.sizes[0] == p.H;
  const bool per_batch = slopes.ndim == 2 && slopes.sizes[0] == p.B && slopes.sizes[1] == p.H;
  if (!per_head && !per_batch)
    fail("alibi_slopes must have shape (H,) = (", p.H, ",) or (B, H) = (", p.B, ", ", p.H, "), got ", shape_of(slopes));
  check_last_stride("alibi_slopes", slopes);
  p.alibi_slopes = static_cast<const float*>(slopes.data);
  p.alibi_batch_stride = per_batch ? slopes.strides[0] : 0;
}

void resolve_dropout(const AttentionProblem& r, Problem& p) {
  if (r.dropout_p == 0.0) return;
  const TensorView& state = r.rng_state;
  if (!state.given()) fail("rng_state is missing; dropout_p = ", r.dropout_p, " needs an int64 tensor of shape (2,)");
  check_dtype("rng_state", state, DType::i64, "");
  check_shape("rng_state", state, {2}, "(2,)");
  check_contiguous("rng_state", state);
  p.rng_state = static_cast<const std::int64_t*>(state.data);
  const bool readable = p.device == Device::cpu;
  p.dropout = make_dropout(r.dropout_p, readable ? p.rng_state[0] : 0, readable ? p.rng_state[1] : 0);
}

}  // namespace

void check_lengths(const char* name, const Integers& cu, std::int64_t total, const char* total_of, std::int64_t longest,
                   const char* max_name) {
  const index_t B = cu.size() - 1;
  if (cu[0] != 0) fail(name, " must start at 0, got ", name, "[0] = ", cu[0]);
  for (index_t b = 0; b < B; ++b) {
    if (cu[b + 1] < cu[b]) fail(name, " must not decrease, got ", cu[b], " then ", cu[b + 1], " at index ", b + 1);
    if (cu[b + 1] - cu[b] > longest)
      fail(max_name, " must be at least the longest sequence of ", name, ", got ", longest, " but sequence ", b,
           " has ", cu[b + 1] - cu[b], " rows");
  }
  if (cu[B] > total)
    fail(name, " must end within the ", total, " rows of ", total_of, ", got ", name, "[", B, "] = ", cu[B]);
}

void check_sequence_lengths(const TensorView& cu_seqlens, bool queries, std::int64_t rows, std::int64_t max_seqlen) {
  const char* const name = queries ? "cu_seqlens_q" : "cu_seqlens_k";
  check_cu_seqlens(name, cu_seqlens);
  check_lengths(name, Integers(cu_seqlens), rows, queries ? "q" : "k", max_seqlen,
                queries ? "max_seqlen_q" : "max_seqlen_k");
}

Problem validate(const AttentionProblem& r) { return resolve_problem(r, {}, 0); }

Problem resolve_problem(const AttentionProblem& r, const KeyNames& names, index_t appended) {
  if (!r.q.given()) fail("q is missing; pass a tensor of shape (B, Sq, H, D), or (Tq, H, D) with cu_seqlens");
  if (!is_floating(r.q.dtype)) fail("q must be float16, bfloat16, float32 or float64, got ", to_string(r.q.dtype));
  check_sizes("q", r.q);
  check_scalars(r);
  Problem p;
  p.dtype = r.q.dtype;
  p.device = r.q.device;
  if (r.cu_seqlens_q.given() || r.cu_seqlens_k.given())
    resolve_varlen(r, p);
  else
    resolve_dense(r, names, p);
  resolve_key_storage(r, names, appended, p);
  p.q = operand(r.q);
  p.k = operand(r.k);
  p.v = operand(r.v);
  check_head_dim("D", "q and k", p.D);
  check_head_dim("Dv", "v", p.Dv);
  if (p.H < 1 || p.Hk < 1 || p.H % p.Hk != 0)
    fail("the number of key/value heads Hk must divide the number of query heads H, got H = ", p.H,
         " in q and Hk = ", p.Hk, " in k");
  p.scale = r.softmax_scale;
  p.softcap = r.softcap > 0.0 ? r.softcap : 0.0;
  p.window_left = r.window_left < 0 || r.window_left >= p.Sk ? -1 : r.window_left;
  p.window_right = r.window_right < 0 || r.window_right >= p.Sk ? -1 : r.window_right;
  if (r.causal) p.window_right = 0;
  resolve_alibi(r, p);
  resolve_dropout(r, p);
  resolve_score_arguments(r, p);
  return p;
}

void resolve_results(const ForwardArgs& args, ForwardProblem& f) {
  const Problem& p = f.problem;
  check_related("out", args.out, p, true, p.H, p.Dv, "(B, Sq, H, Dv)", "(Tq, H, Dv)");
  check_lse_shaped("softmax_lse", args.lse, p);
  f.out = operand(args.out);
  f.lse = args.lse.data;
  if (args.s_dmask.given()) {
    if (args.problem.dropout_p == 0.0)
      fail("S_dmask (return_softmax) needs dropout_p > 0, got dropout_p = 0; leave it out");
    check_dtype("S_dmask", args.s_dmask, p.dtype, " (that of q)");
    check_shape("S_dmask", args.s_dmask, {p.B, p.H, p.Sq, p.Sk}, "(B, H, Sq, Sk)");
    check_contiguous("S_dmask", args.s_dmask);
    f.s_dmask = args.s_dmask.data;
  }
}

ForwardProblem validate(const ForwardArgs& args) {
  ForwardProblem f;
  f.problem = validate(args.problem);
  resolve_results(args, f);
  return f;
}

BackwardProblem validate(const BackwardArgs& args) {
  BackwardProblem b;
  b.problem = validate(args.problem);
  const KeyStorage& storage = b.problem.storage;
  if (storage.pages || storage.batch_index || storage.used || storage.leftpad)
    fail(
        "block_table, cache_batch_idx, seqused_k and leftpad_k have no backward pass; pass None, or do not "
        "differentiate");
  const Problem& p = b.problem;
  check_related("dout", args.dout, p, true, p.H, p.Dv, "(B, Sq, H, Dv)", "(Tq, H, Dv)");
  check_related("out", args.out, p, true, p.H, p.Dv, "(B, Sq, H, Dv)", "(Tq, H, Dv)");
  check_lse_shaped("softmax_lse", args.lse, p);
  check_related("dq", args.dq, p, true, p.H, p.D, "(B, Sq, H, D)", "(Tq, H, D)");
  check_related("dk", args.dk, p, false, p.Hk, p.D, "(B, Sk, Hk, D)", "(Tk, Hk, D)");
  check_related("dv", args.dv, p, false, p.Hk, p.Dv, "(B, Sk, Hk, Dv)", "(Tk, Hk, Dv)");
  check_lse_shaped("softmax_d", args.softmax_d, p);
  b.dout = operand(args.dout);
  b.out = operand(args.out);
  b.dq = operand(args.dq);
  b.dk = operand(args.dk);
  b.dv = operand(args.dv);
  b.lse = args.lse.data;
  b.softmax_d = args.softmax_d.data;
  if (args.dlse.given()) {
    check_lse_shaped("dlse", args.dlse, p);
    b.dlse = args.dlse.data;
  }
  resolve_score_gradients(args, b);
  return b;
}

}  // namespace flash_attn
