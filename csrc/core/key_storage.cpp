#include "core/key_storage.h"

#include <limits>

#include "core/checks.h"
#include "core/rotary.h"
#include "core/validate.h"

namespace flash_attn {
namespace {

const std::int32_t* per_sequence(const char* name, const TensorView& t, const Problem& p) {
  if (!t.given()) return nullptr;
  check_dtype(name, t, DType::i32, "");
  check_shape(name, t, {p.B}, "(B,)");
  check_contiguous(name, t);
  return static_cast<const std::int32_t*>(t.data);
}

void resolve_pages(const AttentionProblem& r, const KeyNames& names, Problem& p) {
  const TensorView& t = r.block_table;
  if (!t.given()) return;
  check_dtype("block_table", t, DType::i32, "");
  if (t.ndim != 2 || t.sizes[0] != p.B)
    fail("block_table must have shape (B, max_pages) = (", p.B, ", max_pages), got ", shape_of(t));
  check_last_stride("block_table", t);
  if (r.cache_batch_idx.given())
    fail(
        "block_table and cache_batch_idx were both given; pages are chosen by block_table alone, so pass "
        "cache_batch_idx=None");
  const index_t page = r.k.sizes[1];
  if (page < 1) fail(names.k, " must have pages of at least one slot, got shape ", shape_of(r.k));
  if (t.sizes[1] > std::numeric_limits<index_t>::max() / page)
    fail("block_table must not have more slots than a 64-bit number counts, got shape ", shape_of(t), " and pages of ",
         page);
  static constexpr std::int32_t no_pages = 0;  // An empty table may have no memory, and is one by its pointer.
  p.storage.pages = t.data ? static_cast<const std::int32_t*>(t.data) : &no_pages;
  p.storage.pages_stride = t.strides[0];
  p.storage.page_size = page;
  p.storage.pages_per_sequence = t.sizes[1];
  if (!p.varlen) p.Sk = t.sizes[1] * page;
}

// Slots of sequence b that exist.
index_t capacity(const AttentionProblem& r, const Problem& p, index_t b) {
  if (p.storage.pages) return r.block_table.sizes[1] * p.storage.page_size;
  return p.varlen ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.Sk;
}

void check_length(const AttentionProblem& r, const KeyNames& names, const Problem& p, index_t b, index_t used) {
  const index_t appended = p.storage.appended, slots = capacity(r, p, b);
  if (p.storage.used && p.storage.used[b] < 0)
    fail(names.used, " must not be negative, got ", names.used, "[", b, "] = ", p.storage.used[b]);
  if (used > slots) {
    const std::string what = p.storage.used ? std::string(names.used) : "cu_seqlens_k";
    const std::string more = appended ? " and " + std::to_string(appended) + " new keys" : "";
    if (p.storage.pages)
      fail(what, more, " need ", used, " slots in sequence ", b, ", but block_table has ", r.block_table.sizes[1],
           " pages of ", p.storage.page_size, " for it; give it more pages");
    fail(what, more, " need ", used, " slots in sequence ", b, ", but ", names.k, " has ", slots, " for it; make ",
         names.k, " longer, or the sequence shorter");
  }
  if (p.varlen && p.storage.used && used > p.Sk)
    fail("max_seqlen_k must be at least the longest sequence, got ", p.Sk, " but ", names.used, "[", b, "] = ", used);
  if (p.storage.leftpad && (p.storage.leftpad[b] < 0 || p.storage.leftpad[b] > slots))
    fail(names.leftpad, " must be from 0 to the ", slots, " slots of a sequence, got ", names.leftpad, "[", b,
         "] = ", p.storage.leftpad[b]);
}

// Contents; only possible where the host can read them.
void check_contents(const AttentionProblem& r, const KeyNames& names, const Problem& p) {
  const KeyStorage& s = p.storage;
  for (index_t b = 0; b < p.B; ++b) {
    const index_t all = p.varlen ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.Sk;
    const index_t used = s.used ? s.used[b] + s.appended : all;
    check_length(r, names, p, b, used);
    if (s.batch_index && (s.batch_index[b] < 0 || s.batch_index[b] >= r.k.sizes[0]))
      fail("cache_batch_idx must be from 0 to ", r.k.sizes[0] - 1, ", the batch elements of ", names.k,
           ", got cache_batch_idx[", b, "] = ", s.batch_index[b]);
    if (!s.pages) continue;
    // From the first slot on that is read or written.
    const index_t first = !s.leftpad ? 0 : s.appended ? min_of<index_t>(s.leftpad[b], s.used[b]) : s.leftpad[b];
    for (index_t n = first / s.page_size; n * s.page_size < used; ++n) {
      const index_t page = s.pages[b * s.pages_stride + n];
      if (page < 0 || page >= r.k.sizes[0])
        fail("block_table must hold pages from 0 to ", r.k.sizes[0] - 1, ", those of ", names.k, ", got block_table[",
             b, ", ", n, "] = ", page, ", which the ", used, " keys of sequence ", b, " need");
    }
  }
}

constexpr KeyNames kCacheNames{"k_cache", "v_cache", "cache_seqlens", "cache_leftpad"};

void resolve_new_keys(const CacheArgs& args, CacheProblem& c) {
  if (!args.k_new.given()) return;
  const Problem& p = c.forward.problem;
  const index_t rows = args.k_new.sizes[1];
  const auto check = [&](const char* name, const TensorView& t, index_t features, const char* letters) {
    check_dtype(name, t, p.dtype, " (that of q)");
    check_device(name, t, p.device);
    check_sizes(name, t);
    check_shape(name, t, {p.B, rows, p.Hk, features}, letters);
    check_last_stride(name, t);
  };
  check("k", args.k_new, p.D, "(B, Snew, Hk, D)");
  check("v", args.v_new, p.Dv, "(B, Snew, Hk, Dv)");
  if (p.Sq > p.Sk)
    fail("q must not have more rows than the cache has slots when k is given, got Sq = ", p.Sq, " and ", p.Sk,
         " slots");
  c.k_new = operand(args.k_new);
  c.v_new = operand(args.v_new);
}

void resolve_rotary(const CacheArgs& args, CacheProblem& c) {
  const TensorView &cos = args.rotary_cos, &sin = args.rotary_sin;
  if (!cos.given() && !sin.given()) return;
  const Problem& p = c.forward.problem;
  if (!cos.given() || !sin.given())
    fail("rotary_cos and rotary_sin come together, got only ", cos.given() ? "rotary_cos" : "rotary_sin",
         "; pass both, or neither");
  if (!args.k_new.given())
    fail(
        "rotary_cos was given without k; rotation is for appended keys and their queries: pass k and v, or neither "
        "table");
  for (const auto& [name, t] : {std::pair("rotary_cos", &cos), std::pair("rotary_sin", &sin)}) {
    check_dtype(name, *t, p.dtype, " (that of q)");
    check_contiguous(name, *t);
  }
  c.rotary = resolve_rotary_tables("rotary_cos", cos, "rotary_sin", sin, p.D);
  c.rotary.interleaved = args.rotary_interleaved;
  if (cos.sizes[0] < p.Sk)
    fail("rotary_cos must have a position for each of the ", p.Sk, " slots of the cache, got ", cos.sizes[0],
         "; make both tables longer");
  c.position_per_row = p.window_left >= 0 || p.window_right >= 0;
  for (index_t b = 0; p.device == Device::cpu && c.position_per_row && b < p.B; ++b)
    if (p.storage.used[b] + p.Sq > cos.sizes[0])
      fail("rotary_cos must have a position for each row of q, from cache_seqlens[", b, "] = ", p.storage.used[b],
           " on for Sq = ", p.Sq, " rows, got ", cos.sizes[0], "; make both tables longer");
}

}  // namespace

void resolve_key_storage(const AttentionProblem& r, const KeyNames& names, index_t appended, Problem& p) {
  resolve_pages(r, names, p);
  p.storage.used = per_sequence(names.used, r.seqused_k, p);
  p.storage.leftpad = per_sequence(names.leftpad, r.leftpad_k, p);
  p.storage.batch_index = per_sequence("cache_batch_idx", r.cache_batch_idx, p);
  p.storage.appended = appended;
  p.storage.batches = r.k.sizes[0];
  if (p.varlen && p.storage.batch_index)
    fail("cache_batch_idx was given with cu_seqlens; it is for dense caches, so pass None");
  if (r.num_splits < 0 || r.num_splits > 128) fail("num_splits must be from 0 to 128, got ", r.num_splits);
  p.num_splits = static_cast<int>(r.num_splits);
  if (p.device == Device::cpu) check_contents(r, names, p);
}

CacheProblem validate_inputs(const CacheArgs& args) {
  const TensorView& k = args.k_new;
  if (k.given() != args.v_new.given())
    fail("k and v come together, got only ", k.given() ? "k" : "v", "; pass both, or neither");
  if (k.given() && !args.problem.seqused_k.given())
    fail("cache_seqlens is missing; it says where k and v are appended: pass it as int32 of shape (B,)");
  if (k.given() && k.ndim != 4) fail("k must have 4 dimensions (B, Snew, Hk, D), got shape ", shape_of(k));
  if (args.problem.cu_seqlens_q.given() || args.problem.cu_seqlens_k.given())
    fail("cu_seqlens were given; a call with a cache takes dense q (B, Sq, H, D), so leave them out");
  CacheProblem c;
  c.forward.problem = resolve_problem(args.problem, kCacheNames, k.given() ? k.sizes[1] : 0);
  resolve_new_keys(args, c);
  resolve_rotary(args, c);
  return c;
}

CacheProblem validate(const CacheArgs& args) {
  CacheProblem c = validate_inputs(args);
  resolve_results({args.problem, args.out, args.lse, {}}, c.forward);
  return c;
}

}  // namespace flash_attn
