// The C interface: structs of any version to the C++ ones, exceptions to status codes.
#include <cstring>
#include <new>
#include <type_traits>

#include "core/checks.h"
#include "core/platform.h"
#include "flash_attn/attention.h"
#include "flash_attn/flash_attn.h"
#include "flash_attn/rotary.h"

namespace flash_attn {
namespace {

// Needs no destructor, so that a call from one that runs after those of the thread finds it.
thread_local char last_error[2048] = "";

class VersionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void bad_size(const char* name, std::size_t given, std::size_t known) {
  throw VersionError(std::string("flash_attn: struct_size of ") + name + " is " + std::to_string(given) +
                     ", and this library (" + kVersion + ") knows " + std::to_string(known) +
                     " bytes; call its _init function first, or update the library if the program is newer");
}

// `known` starts with its defaults and receives what the caller's header has of it. Bytes that only the caller knows
// must be zero.
template <class Struct>
void read_versioned(Struct& known, const void* given, std::size_t size, const char* name) {
  constexpr std::size_t least = sizeof(std::size_t);
  if (size < least || size % alignof(std::size_t) != 0) bad_size(name, size, sizeof(Struct));
  std::memcpy(&known, given, size < sizeof(Struct) ? size : sizeof(Struct));
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i)
    if (bytes[i] != 0) bad_size(name, size, sizeof(Struct));
  known.struct_size = sizeof(Struct);
}

template <class Struct>
Struct defaults() {
  Struct s;
  std::memset(&s, 0, sizeof(s));
  s.struct_size = sizeof(s);
  if constexpr (std::is_same_v<Struct, flash_attn_problem>) {
    s.softmax_scale = 1.0;
    s.window_left = s.window_right = -1;
  }
  if constexpr (std::is_same_v<Struct, flash_attn_cache_args>) s.rotary_interleaved = 1;
  return s;
}

// Into no more bytes than the caller's header has; those that it alone knows are zero.
template <class Struct>
void write_defaults(Struct* to, std::size_t size) {
  const Struct known = defaults<Struct>();
  std::memset(to, 0, size);
  std::memcpy(to, &known, min_of(size, sizeof(known)));
  std::memcpy(to, &size, min_of(size, sizeof(size)));
}

template <class Struct>
Struct read(const Struct* given, const char* name) {
  if (!given)
    throw Error(std::string("flash_attn: ") + name + " is NULL; pass a struct that its _init function has filled");
  Struct known = defaults<Struct>();
  read_versioned(known, given, given->struct_size, name);
  return known;
}

TensorView view(const flash_attn_tensor& t, const char* name) {
  TensorView result;
  if (t.ndim == 0) return result;
  if (t.ndim < 0 || t.ndim > 4)
    throw Error(std::string("flash_attn: ") + name + ".ndim must be from 0 to 4, got " + std::to_string(t.ndim));
  if (t.dtype < FLASH_ATTN_F16 || t.dtype > FLASH_ATTN_BOOL)
    throw Error(std::string("flash_attn: ") + name +
                ".dtype must be a flash_attn_dtype (FLASH_ATTN_F16 to FLASH_ATTN_BOOL), got " +
                std::to_string(t.dtype));
  result.data = t.data;
  result.dtype = static_cast<DType>(t.dtype);
  result.ndim = t.ndim;
  for (int d = 0; d < t.ndim; ++d) {
    result.sizes[d] = t.sizes[d], result.strides[d] = t.strides[d];
    if (t.sizes[d] < 0)
      throw Error(std::string("flash_attn: ") + name + ".sizes must not be negative, got " +
                  std::to_string(t.sizes[d]));
  }
  check_sizes(name, result);
  if (!t.data && !has_no_elements(result))
    throw Error(std::string("flash_attn: ") + name +
                ".data is NULL; set it, or ndim to 0 for a tensor that is not given");
  return result;
}

AttentionProblem problem_of(const flash_attn_problem* given) {
  const flash_attn_problem p = read(given, "problem");
  AttentionProblem r;
  r.q = view(p.q, "q"), r.k = view(p.k, "k"), r.v = view(p.v, "v");
  r.cu_seqlens_q = view(p.cu_seqlens_q, "cu_seqlens_q"), r.cu_seqlens_k = view(p.cu_seqlens_k, "cu_seqlens_k");
  r.max_seqlen_q = p.max_seqlen_q, r.max_seqlen_k = p.max_seqlen_k;
  r.softmax_scale = p.softmax_scale, r.softcap = p.softcap, r.causal = p.causal != 0;
  r.window_left = p.window_left, r.window_right = p.window_right;
  r.alibi_slopes = view(p.alibi_slopes, "alibi_slopes");
  r.dropout_p = p.dropout_p, r.rng_state = view(p.rng_state, "rng_state");
  r.attn_bias = view(p.attn_bias, "attn_bias"), r.attn_mask = view(p.attn_mask, "attn_mask");
  r.key_begin = view(p.key_begin, "key_begin"), r.key_end = view(p.key_end, "key_end");
  r.block_table = view(p.block_table, "block_table"), r.cache_batch_idx = view(p.cache_batch_idx, "cache_batch_idx");
  r.seqused_k = view(p.seqused_k, "seqused_k"), r.leftpad_k = view(p.leftpad_k, "leftpad_k");
  r.num_splits = p.num_splits;
  r.learnable_sink = view(p.learnable_sink, "learnable_sink");
  return r;
}

Executor executor_of(const flash_attn_executor* given) {
  if (!given) return default_executor();
  flash_attn_executor e{};
  read_versioned(e, given, given->struct_size, "executor");
  if (e.num_threads < 1)
    throw Error(std::string("flash_attn: executor.num_threads must be at least 1, got ") +
                std::to_string(e.num_threads));
  if (!e.run && e.num_threads > 1)
    throw Error("flash_attn: executor.run is NULL; it is needed for more than one thread: set it, or num_threads to 1");
  return {e.num_threads, e.run, e.context, {}};
}

template <class Call>
flash_attn_status guarded(Call&& call) noexcept {
  const auto fail = [](flash_attn_status status, const char* text) noexcept {
    std::strncpy(last_error, text, sizeof(last_error) - 1);
    return status;
  };
  try {
    call();
    return FLASH_ATTN_OK;
  } catch (const VersionError& error) {
    return fail(FLASH_ATTN_VERSION, error.what());
  } catch (const NotSupported& error) {
    return fail(FLASH_ATTN_NOT_SUPPORTED, error.what());
  } catch (const Error& error) {
    return fail(FLASH_ATTN_INVALID, error.what());
  } catch (const std::bad_alloc&) {
    return fail(FLASH_ATTN_FAILED, "flash_attn: out of memory");
  } catch (const std::exception& error) {
    return fail(FLASH_ATTN_FAILED, error.what());
  } catch (...) {
    return fail(FLASH_ATTN_FAILED, "flash_attn: unknown failure");
  }
}

}  // namespace
}  // namespace flash_attn

extern "C" {

void flash_attn_default_problem(flash_attn_problem* problem, size_t struct_size) {
  flash_attn::write_defaults(problem, struct_size);
}
void flash_attn_default_forward_args(flash_attn_forward_args* args, size_t struct_size) {
  flash_attn::write_defaults(args, struct_size);
}
void flash_attn_default_backward_args(flash_attn_backward_args* args, size_t struct_size) {
  flash_attn::write_defaults(args, struct_size);
}
void flash_attn_default_cache_args(flash_attn_cache_args* args, size_t struct_size) {
  flash_attn::write_defaults(args, struct_size);
}
void flash_attn_default_rotary_args(flash_attn_rotary_args* args, size_t struct_size) {
  flash_attn::write_defaults(args, struct_size);
}

flash_attn_status flash_attn_forward(const flash_attn_forward_args* given, const flash_attn_executor* executor) {
  using namespace flash_attn;
  return guarded([&] {
    const auto args = read(given, "args");
    attention_forward(
        {problem_of(args.problem), view(args.out, "out"), view(args.lse, "lse"), view(args.s_dmask, "s_dmask")},
        executor_of(executor));
  });
}

flash_attn_status flash_attn_backward(const flash_attn_backward_args* given, const flash_attn_executor* executor) {
  using namespace flash_attn;
  return guarded([&] {
    const auto a = read(given, "args");
    attention_backward({problem_of(a.problem), view(a.dout, "dout"), view(a.out, "out"), view(a.lse, "lse"),
                        view(a.dq, "dq"), view(a.dk, "dk"), view(a.dv, "dv"), view(a.softmax_d, "softmax_d"),
                        view(a.dlse, "dlse"), view(a.dbias, "dbias"), view(a.dsink, "dsink")},
                       executor_of(executor));
  });
}

flash_attn_status flash_attn_with_cache(const flash_attn_cache_args* given, const flash_attn_executor* executor) {
  using namespace flash_attn;
  return guarded([&] {
    const auto a = read(given, "args");
    attention_with_cache(
        {problem_of(a.problem), view(a.k_new, "k_new"), view(a.v_new, "v_new"), view(a.rotary_cos, "rotary_cos"),
         view(a.rotary_sin, "rotary_sin"), a.rotary_interleaved != 0, view(a.out, "out"), view(a.lse, "lse")},
        executor_of(executor));
  });
}

flash_attn_status flash_attn_rotary(const flash_attn_rotary_args* given, const flash_attn_executor* executor) {
  using namespace flash_attn;
  return guarded([&] {
    const auto a = read(given, "args");
    apply_rotary({view(a.x, "x"), view(a.cos, "cos"), view(a.sin, "sin"), view(a.out, "out"), a.offset,
                  view(a.offsets, "offsets"), view(a.cu_seqlens, "cu_seqlens"), a.max_seqlen, a.interleaved != 0,
                  a.conjugate != 0},
                 executor_of(executor));
  });
}

const char* flash_attn_last_error(void) { return flash_attn::last_error; }
const char* flash_attn_version(void) { return flash_attn::kVersion; }

}  // extern "C"
