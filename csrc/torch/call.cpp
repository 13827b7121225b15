#include "call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "views.h"

namespace flash_attn::torch_binding {
namespace {

using Sizes = std::vector<c10::SymInt>;

std::int64_t concrete(const c10::SymInt& value) { return value.guard_int(__FILE__, __LINE__); }

void check_rank(const Call& call, const at::Tensor& tensor, const char* name, const char* dense, const char* varlen) {
  TORCH_CHECK(tensor.defined(), "flash_attn: ", name, " is None; it must be a tensor ", call.varlen() ? varlen : dense);
  const int ndim = call.varlen() ? 3 : 4;
  TORCH_CHECK(tensor.dim() == ndim, "flash_attn: ", name, " must have ", ndim, " dimensions ",
              call.varlen() ? varlen : dense, call.varlen() ? " when cu_seqlens are given" : "", ", got shape ",
              tensor.sym_sizes());
}

/// The sizes of the results come from these tensors before the core sees the problem.
void check_ranks(const Call& call) {
  check_rank(call, call.q, "q", "(B, Sq, H, D)", "(Tq, H, D)");
  if (call.block_table.defined()) {
    for (const auto& [name, tensor] : {std::pair("k", &call.k), std::pair("v", &call.v)})
      TORCH_CHECK(tensor->dim() == 4, "flash_attn: ", name,
                  " must have 4 dimensions (num_pages, page, Hk, D) when "
                  "block_table is given, got shape ",
                  tensor->sym_sizes());
    return;
  }
  check_rank(call, call.k, "k", "(B, Sk, Hk, D)", "(Tk, Hk, D)");
  check_rank(call, call.v, "v", "(B, Sk, Hk, Dv)", "(Tk, Hk, Dv)");
}

at::Tensor allocate_like_lse(const Call& call) {
  const auto& q = call.q;
  const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Sizes sizes =
      call.varlen() ? Sizes{q.sym_size(1), q.sym_size(0)} : Sizes{q.sym_size(0), q.sym_size(2), q.sym_size(1)};
  return at::empty_symint(sizes, q.options().dtype(dtype));
}

at::Tensor allocate_s_dmask(const Call& call) {
  const auto options = call.q.options();
  if (!call.return_softmax || !(call.dropout_p > 0)) return at::empty({0}, options);
  if (!call.varlen()) {
    return at::empty_symint({call.q.sym_size(0), call.q.sym_size(2), call.q.sym_size(1), call.k.sym_size(1)}, options);
  }
  const auto check_size = [](const c10::SymInt& size, const char* name, int least) {
    if (!size.is_symbolic())
      TORCH_CHECK(size >= least, "flash_attn: ", name, " must be at least ", least, ", got ", size);
  };
  const auto& cu_seqlens = call.cu_seqlens_q.defined() ? call.cu_seqlens_q : call.cu_seqlens_k;
  check_size(cu_seqlens.sym_numel(), "the size B + 1 of cu_seqlens_q", 1);
  check_size(call.max_seqlen_q, "max_seqlen_q", 0);
  check_size(call.max_seqlen_k, "max_seqlen_k", 0);
  return at::empty_symint({cu_seqlens.sym_numel() - 1, call.q.sym_size(1), call.max_seqlen_q, call.max_seqlen_k},
                          options);
}

at::Tensor allocate_like(const at::Tensor& tensor) { return at::empty_symint(tensor.sym_sizes(), tensor.options()); }

bool has_contiguous_rows(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.dim() == 0 || tensor.stride(-1) == 1 || tensor.size(-1) <= 1;
}

/// False for fake and meta tensors, and for classes that wrap others.
bool has_memory(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.is_meta() && !tensor.key_set().has(c10::DispatchKey::Python);
}

/// `call` with memory of the same shapes where an operator would copy to get contiguous rows: checks read no values.
Call for_checks(Call call) {
  for (at::Tensor* tensor : {&call.q, &call.k, &call.v, &call.attn_bias, &call.learnable_sink}) {
    if (!has_contiguous_rows(*tensor)) *tensor = at::empty(tensor->sizes(), tensor->options());
  }
  return call;
}

}  // namespace

AttentionProblem problem_of(const Call& call) {
  const at::Device device = call.q.device();
  AttentionProblem problem;
  problem.q = view(call.q, "q", device);
  problem.k = view(call.k, "k", device);
  problem.v = view(call.v, "v", device);
  problem.cu_seqlens_q = view(call.cu_seqlens_q, "cu_seqlens_q", device);
  problem.cu_seqlens_k = view(call.cu_seqlens_k, "cu_seqlens_k", device);
  problem.max_seqlen_q = concrete(call.max_seqlen_q);
  problem.max_seqlen_k = concrete(call.max_seqlen_k);
  problem.softmax_scale = call.softmax_scale;
  problem.softcap = call.softcap;
  problem.causal = call.causal;
  problem.window_left = concrete(call.window_left);
  problem.window_right = concrete(call.window_right);
  problem.alibi_slopes = view(call.alibi_slopes, "alibi_slopes", device);
  problem.dropout_p = call.dropout_p;
  problem.rng_state = view(call.rng_state, "rng_state", device);
  problem.attn_bias = view(call.attn_bias, "attn_bias", device);
  problem.attn_mask = view(call.attn_mask, "attn_mask", device);
  problem.key_begin = view(call.key_begin, "key_begin", device);
  problem.key_end = view(call.key_end, "key_end", device);
  problem.block_table = view(call.block_table, "block_table", device);
  problem.seqused_k = view(call.seqused_k, "seqused_k", device);
  problem.leftpad_k = view(call.leftpad_k, "leftpad_k", device);
  problem.cache_batch_idx = view(call.cache_batch_idx, "cache_batch_idx", device);
  problem.num_splits = call.num_splits;
  problem.learnable_sink = view(call.learnable_sink, "learnable_sink", device);
  return problem;
}

void mark_written(const at::Tensor& buffer) {
  if (buffer.defined() && !buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> unpack(at::TensorList inputs, bool varlen) {
  const auto part = [&](const at::Tensor& packed, int index, const char* name, int parts) {
    TORCH_CHECK(packed.dim() == (varlen ? 4 : 5) && packed.sym_size(-3) == parts, "flash_attn: ", name,
                " must have shape ", varlen ? "(T, " : "(B, S, ", parts, ", H, D), got ", packed.sym_sizes());
    return packed.select(-3, index);
  };
  switch (packing_of(inputs)) {
    case Packing::kv: return {inputs[0], part(inputs[1], 0, "kv", 2), part(inputs[1], 1, "kv", 2)};
    case Packing::qkv:
      return {part(inputs[0], 0, "qkv", 3), part(inputs[0], 1, "qkv", 3), part(inputs[0], 2, "qkv", 3)};
    default: return {inputs[0], inputs[1], inputs[2]};
  }
}

at::Tensor draw_rng_state(const Call& call) {
  if (!(call.dropout_p > 0)) return {};
  check_ranks(call);
  if (has_memory(call.q) && has_memory(call.k) && has_memory(call.v))
    calling_core([&] { check_problem(problem_of(for_checks(call))); });
  return at::randint(std::numeric_limits<std::int64_t>::max(), {2}, call.q.options().dtype(at::kLong));
}

ForwardResult allocate_forward(const Call& call, const at::Tensor& out) {
  check_ranks(call);
  Sizes sizes = call.q.sym_sizes().vec();
  sizes.back() = call.v.sym_size(-1);
  return {out.defined() ? out : at::empty_symint(sizes, call.q.options()), allocate_like_lse(call),
          allocate_s_dmask(call)};
}

std::vector<at::Tensor> allocate_gradients(const Call& call, Packing packing, Gradients& grads) {
  const auto packed_like = [](const at::Tensor& part, int parts) {
    Sizes sizes = part.sym_sizes().vec();
    sizes.insert(sizes.end() - 2, c10::SymInt(parts));
    return at::empty_symint(sizes, part.options());
  };
  check_ranks(call);
  if (packing == Packing::qkv) {
    const auto dqkv = packed_like(call.q, 3);
    grads = {dqkv.select(-3, 0), dqkv.select(-3, 1), dqkv.select(-3, 2), {}, {}};
    return {dqkv};
  }
  const auto dq = allocate_like(call.q);
  if (packing == Packing::kv) {
    const auto dkv = packed_like(call.k, 2);
    grads = {dq, dkv.select(-3, 0), dkv.select(-3, 1), {}, {}};
    return {dq, dkv};
  }
  grads = {dq, allocate_like(call.k), allocate_like(call.v), {}, {}};
  return {grads.dq, grads.dk, grads.dv};
}

at::Tensor allocate_softmax_d(const Call& call) {
  check_ranks(call);
  return allocate_like_lse(call);
}

at::Tensor contiguous_rows(const at::Tensor& tensor) {
  return has_contiguous_rows(tensor) ? tensor : tensor.contiguous();
}

ForwardResult forward(const Call& call, const at::Tensor& out) {
  check_ranks(call);
  if (out.defined()) check_rank(call, out, "out", "(B, Sq, H, Dv)", "(Tq, H, Dv)");
  ForwardArgs args;
  args.problem = problem_of(call);
  const ForwardResult result = allocate_forward(call, out);
  const at::Device device = call.q.device();
  args.out = view(result.out, "out", device);
  args.lse = view(result.softmax_lse, "softmax_lse", device);
  if (call.return_softmax && call.dropout_p > 0) args.s_dmask = view(result.s_dmask, "S_dmask", device);
  calling_core([&] { attention_forward(args, CallExecutor(device)); });
  mark_written(out);
  return result;
}

at::Tensor backward(const Call& call, const Saved& saved, Gradients& grads) {
  check_ranks(call);
  const at::Device device = call.q.device();
  const auto operand = [&](const at::Tensor& tensor, const char* name, const char* dense, const char* varlen) {
    check_rank(call, tensor, name, dense, varlen);
    return view(tensor, name, device);
  };
  const auto destination = [&](at::Tensor& grad, const at::Tensor& like) -> const at::Tensor& {
    return grad.defined() ? grad : grad = allocate_like(like);
  };
  BackwardArgs args;
  args.problem = problem_of(call);
  args.dout = operand(saved.dout, "dout", "(B, Sq, H, Dv)", "(Tq, H, Dv)");
  args.out = operand(saved.out, "out", "(B, Sq, H, Dv)", "(Tq, H, Dv)");
  args.lse = view(saved.softmax_lse, "softmax_lse", device);
  args.dq = operand(destination(grads.dq, call.q), "dq", "(B, Sq, H, D)", "(Tq, H, D)");
  args.dk = operand(destination(grads.dk, call.k), "dk", "(B, Sk, Hk, D)", "(Tk, Hk, D)");
  args.dv = operand(destination(grads.dv, call.v), "dv", "(B, Sk, Hk, Dv)", "(Tk, Hk, Dv)");
  const auto softmax_d = allocate_softmax_d(call);
  args.softmax_d = view(softmax_d, "softmax_d", device);
  args.dlse = view(saved.dlse, "dlse", device);
  args.dbias = view(grads.dbias, "dbias", device);
  args.dsink = view(grads.dsink, "dsink", device);
  calling_core([&] { attention_backward(args, executor_for(device)); });
  for (const auto* grad : {&grads.dq, &grads.dk, &grads.dv}) mark_written(*grad);
  return softmax_d;
}

at::Tensor reported_rng_state(const Call& call) {
  return call.rng_state.defined() ? call.rng_state : at::zeros({2}, call.q.options().dtype(at::kLong));
}

Explanation explain(Call call, Pass pass) {
  call.rng_state = reported_rng_state(call);
  return calling_core([&] { return flash_attn::explain(problem_of(call), pass, CallExecutor(call.q.device())); });
}

void check_return_softmax(const Call& call) {
  TORCH_CHECK(!call.return_softmax || call.dropout_p > 0, "flash_attn: return_softmax=True needs dropout_p > 0, got ",
              call.dropout_p, "; pass return_softmax=False");
}

}  // namespace flash_attn::torch_binding
