#include "hip/host/arguments.h"

#include <initializer_list>
#include <limits>
#include <string_view>

namespace flash_attn::gpu {
namespace {

// A tensor of the problem with its sizes: (batches, rows, heads, features), one batch element when packed.
struct Sized {
  const char* name;
  Operand operand;
  index_t batches, rows, heads, features;
  bool written = false;
};

Sized query_like(const Problem& p, const char* name, const Operand& x, index_t features, bool written = false) {
  return {name, x, p.varlen ? 1 : p.B, p.varlen ? p.Tq : p.Sq, p.H, features, written};
}
Sized key_like(const Problem& p, const char* name, const Operand& x, index_t features, bool written = false) {
  const KeyStorage& s = p.storage;
  if (s.pages) return {name, x, s.batches, s.page_size, p.Hk, features, written};
  return {name, x, p.varlen ? 1 : s.batches, p.varlen ? p.Tk : p.Sk, p.Hk, features, written};
}

std::vector<Sized> tensors_of(const Problem& p) {
  return {query_like(p, "q", p.q, p.D), key_like(p, "k", p.k, p.D), key_like(p, "v", p.v, p.Dv)};
}
std::vector<Sized> tensors_of(const ForwardProblem& f) {
  std::vector<Sized> all = tensors_of(f.problem);
  all.push_back(query_like(f.problem, "out", f.out, f.problem.Dv, true));
  return all;
}
std::vector<Sized> tensors_of(const BackwardProblem& b) {
  const Problem& p = b.problem;
  std::vector<Sized> all = tensors_of(p);
  all.insert(all.end(), {query_like(p, "dout", b.dout, p.Dv), query_like(p, "out", b.out, p.Dv),
                         query_like(p, "dq", b.dq, p.D, true), key_like(p, "dk", b.dk, p.D, true),
                         key_like(p, "dv", b.dv, p.Dv, true)});
  return all;
}

bool regular(const Problem& p, const std::vector<Sized>& tensors) {
  const index_t size = size_of(p.dtype), unit = 16 / size;
  for (const Sized& t : tensors) {
    const Operand& x = t.operand;
    if (reinterpret_cast<std::uintptr_t>(x.data) % 16 || t.features % unit) return false;
    if (x.batch_stride % unit || x.row_stride % unit || x.head_stride % unit) return false;
    if (x.row_stride < 0 || 256 * x.row_stride * size > std::numeric_limits<std::int32_t>::max()) return false;
  }
  return true;
}

std::int32_t narrow(index_t value, const char* what) {
  if (value >= std::numeric_limits<std::int32_t>::min() && value <= std::numeric_limits<std::int32_t>::max())
    return static_cast<std::int32_t>(value);
  throw NotSupported(std::string("flash_attn: ") + what + " = " + std::to_string(value) +
                     " does not fit in 32 bits, which the GPU kernels need");
}

TensorArg tensor(const Operand& x) { return {x.data, x.batch_stride, x.row_stride, x.head_stride}; }

AttentionArgs attention_args(const Problem& p, bool is_regular) {
  AttentionArgs a{};
  a.q = tensor(p.q), a.k = tensor(p.k), a.v = tensor(p.v);
  a.B = narrow(p.B, "B"), a.H = narrow(p.H, "H"), a.Hk = narrow(p.Hk, "Hk");
  a.D = narrow(p.D, "D"), a.Dv = narrow(p.Dv, "Dv");
  a.Sq = narrow(p.Sq, "Sq"), a.Sk = narrow(p.Sk, "Sk");
  // Dense kernels do not ask for the rows of packed tensors. Lengths of keys in pages have the table's bound.
  if (p.varlen) a.Tq = narrow(p.Tq, "Tq"), a.Tk = narrow(p.Tk, "Tk");
  if (p.storage.pages) a.Tk = std::numeric_limits<std::int32_t>::max();
  a.cu_seqlens_q = p.cu_seqlens_q, a.cu_seqlens_k = p.cu_seqlens_k;
  a.scale_log2 = float(p.scale * kLog2e);
  a.softcap_log2 = float(p.softcap * kLog2e);
  a.inverse_softcap = p.softcap > 0 ? float(p.scale / p.softcap) : 0.0f;
  a.window_left = narrow(p.window_left, "window_size_left"),
  a.window_right = narrow(p.window_right, "window_size_right");
  a.alibi_slopes = p.alibi_slopes;
  a.alibi_batch_stride = narrow(p.alibi_batch_stride, "the batch stride of alibi_slopes");
  a.keep_threshold = p.dropout.keep_threshold;
  a.keep_scale = float(p.dropout.keep_scale);
  a.rng_state = p.dropout.active ? p.rng_state : nullptr;
  a.regular = is_regular;
  return a;
}

KeyStorageArg storage_arg(const KeyStorage& s) {
  KeyStorageArg arg{};
  arg.used = s.used, arg.leftpad = s.leftpad, arg.batch_index = s.batch_index, arg.pages = s.pages;
  arg.batches = narrow(s.batches, "batch elements, or pages, of k");
  arg.appended = narrow(s.appended, "new keys of a sequence");
  if (!s.pages) return arg;
  arg.pages_stride = s.pages_stride;
  arg.page = page_size(narrow(s.page_size, "slots of a page"));
  arg.pages_per_sequence = narrow(s.pages_per_sequence, "pages of block_table");
  narrow(s.page_size * s.pages_per_sequence, "slots of block_table");
  return arg;
}

// ---- What simulated runtimes are told.

using Buffers = std::vector<GpuRuntime::Buffer>;

void add_tensors(Buffers& buffers, const Problem& p, const std::vector<Sized>& tensors) {
  for (const Sized& t : tensors) {
    if (t.batches * t.rows * t.heads * t.features == 0) continue;
    const index_t last = (t.batches - 1) * t.operand.batch_stride + (t.rows - 1) * t.operand.row_stride +
                         (t.heads - 1) * t.operand.head_stride + t.features;
    buffers.push_back({t.operand.data, static_cast<unsigned long long>(last * size_of(p.dtype)), t.written, t.name});
  }
}

void add(Buffers& buffers, const void* data, index_t bytes, bool written, const char* name) {
  if (data && bytes > 0) buffers.push_back({data, static_cast<unsigned long long>(bytes), written, name});
}

void add_common(Buffers& buffers, const Problem& p) {
  add(buffers, p.cu_seqlens_q, (p.B + 1) * 4, false, "cu_seqlens_q");
  add(buffers, p.cu_seqlens_k, (p.B + 1) * 4, false, "cu_seqlens_k");
  const index_t slopes = p.alibi_batch_stride * (p.B - 1) + p.H;
  add(buffers, p.alibi_slopes, slopes * 4, false, "alibi_slopes");
  add(buffers, p.rng_state, 16, false, "rng_state");
  const KeyStorage& s = p.storage;
  add(buffers, s.used, p.B * 4, false, "seqused_k");
  add(buffers, s.leftpad, p.B * 4, false, "leftpad_k");
  add(buffers, s.batch_index, p.B * 4, false, "cache_batch_idx");
  add(buffers, s.pages, ((p.B - 1) * s.pages_stride + s.pages_per_sequence) * 4, false, "block_table");
}

index_t lse_rows(const Problem& p) { return p.H * (p.varlen ? p.Tq : p.B * p.Sq); }
index_t lse_bytes(const Problem& p) { return lse_rows(p) * 4; }

}  // namespace

bool is_regular(const Problem& problem) { return regular(problem, tensors_of(problem)); }
bool is_regular(const ForwardProblem& f) { return regular(f.problem, tensors_of(f)); }
bool is_regular(const BackwardProblem& b) { return regular(b.problem, tensors_of(b)); }

ForwardArgs forward_args(const ForwardProblem& f) {
  return {attention_args(f.problem, is_regular(f)),
          tensor(f.out),
          static_cast<float*>(f.lse),
          storage_arg(f.problem.storage),
          {1, lse_rows(f.problem), nullptr, nullptr}};
}

index_t scratch_bytes(const Problem& p, index_t splits) { return splits * lse_rows(p) * (p.Dv + 1) * 4; }

void give_scratch(SplitsArg& splits, const Problem& p, void* scratch) {
  splits.out = static_cast<float*>(scratch);
  splits.lse = splits.out + splits.count * splits.rows * p.Dv;
}

CombineArgs combine_args(const ForwardProblem& f, const ForwardArgs& forward, int wave) {
  const Problem& p = f.problem;
  return {forward.splits,
          forward.out,
          forward.lse,
          forward.attention.H,
          narrow(p.varlen ? p.Tq : p.Sq, "rows of q"),
          forward.attention.Dv,
          narrow(ceil_div(p.Dv, index_t(wave)), "waves of a row")};
}

AppendArgs append_args(const CacheProblem& c, const Operand& rotated) {
  const Problem& p = c.forward.problem;
  AppendArgs args{};
  args.attention = attention_args(p, false);
  args.keys = storage_arg(p.storage);
  args.k_new = tensor(c.k_new), args.v_new = tensor(c.v_new);
  args.new_rows = args.keys.appended;
  args.attention.tiles = narrow(p.storage.appended + (c.rotary.given ? p.Sq : 0), "rows of q and new keys");
  if (!c.rotary.given) return args;
  args.rotated = tensor(rotated);
  args.cos = c.rotary.cos.data, args.sin = c.rotary.sin.data;
  args.positions = narrow(c.rotary.positions, "positions of rotary_cos");
  args.half = narrow(c.rotary.half, "columns of rotary_cos");
  args.interleaved = c.rotary.interleaved, args.position_per_row = c.position_per_row;
  return args;
}

ForwardDmaskArgs dmask_args(const ForwardProblem& f) { return {attention_args(f.problem, is_regular(f)), f.s_dmask}; }

BackwardArgs backward_args(const BackwardProblem& b) {
  return {attention_args(b.problem, is_regular(b)),
          tensor(b.dout),
          tensor(b.out),
          tensor(b.dq),
          tensor(b.dk),
          tensor(b.dv),
          static_cast<const float*>(b.lse),
          static_cast<float*>(b.softmax_d),
          static_cast<const float*>(b.dlse)};
}

Buffers buffers_of(const ForwardProblem& f, const SplitsArg& splits) {
  Buffers buffers;
  add_tensors(buffers, f.problem, tensors_of(f));
  add_common(buffers, f.problem);
  add(buffers, f.lse, lse_bytes(f.problem), true, "softmax_lse");
  const Problem& p = f.problem;
  add(buffers, f.s_dmask, p.B * p.H * p.Sq * p.Sk * size_of(p.dtype), true, "S_dmask");
  add(buffers, splits.out, scratch_bytes(p, splits.count), true, "scratch memory");
  return buffers;
}

Buffers buffers_of(const CacheProblem& c, const Operand& rotated) {
  const Problem& p = c.forward.problem;
  std::vector<Sized> tensors = tensors_of(p);
  for (Sized& t : tensors) t.written = std::string_view(t.name) != "q";
  if (c.rotary.given) tensors.push_back(query_like(p, "rotated q", rotated, p.D, true));
  const index_t rows = p.storage.appended;
  tensors.push_back({"new k", c.k_new, p.B, rows, p.Hk, p.D});
  tensors.push_back({"new v", c.v_new, p.B, rows, p.Hk, p.Dv});
  Buffers buffers;
  add_tensors(buffers, p, tensors);
  add_common(buffers, p);
  const index_t table = c.rotary.positions * c.rotary.half * size_of(p.dtype);
  add(buffers, c.rotary.cos.data, table, false, "rotary_cos");
  add(buffers, c.rotary.sin.data, table, false, "rotary_sin");
  return buffers;
}

Buffers buffers_of(const BackwardProblem& b) {
  Buffers buffers;
  add_tensors(buffers, b.problem, tensors_of(b));
  add_common(buffers, b.problem);
  add(buffers, b.lse, lse_bytes(b.problem), false, "softmax_lse");
  add(buffers, b.dlse, lse_bytes(b.problem), false, "dlse");
  add(buffers, b.softmax_d, lse_bytes(b.problem), true, "softmax_d");
  return buffers;
}

}  // namespace flash_attn::gpu
