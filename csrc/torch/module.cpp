// The Python module flash_attn_2_cuda: upstream's five raw functions in their positional order, outside autograd, and
// what flash_attn's own Python code needs of the core.
//
// The raw functions are strict: a tensor whose last stride is not 1 is refused, buffers are written where they are.
// They always write every element of their results, which is all that zero_tensors could ask for.
#include <ATen/record_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "devices.h"
#include "kvcache.h"
#include "plain_call.h"
#include "views.h"

namespace flash_attn::torch_binding {
namespace {

using OptionalTensor = c10::optional<at::Tensor>;
using Tensors = std::vector<at::Tensor>;

at::Tensor tensor_or_none(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

void refuse_generator(const py::object& generator) {
  TORCH_CHECK(
      generator.is_none(),
      "flash_attn: the `generator` argument is no longer supported; pass None, dropout follows torch.manual_seed");
}

struct Scores {
  double p_dropout, softmax_scale;
  bool is_causal;
  std::int64_t window_size_left, window_size_right;
  double softcap;
};

Call make_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& alibi_slopes,
               const Scores& scores) {
  Call call;
  call.q = q, call.k = k, call.v = v;
  call.alibi_slopes = tensor_or_none(alibi_slopes);
  call.dropout_p = scores.p_dropout, call.softmax_scale = scores.softmax_scale, call.softcap = scores.softcap;
  call.causal = scores.is_causal;
  call.window_left = scores.window_size_left, call.window_right = scores.window_size_right;
  return call;
}

void set_lengths(Call& call, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, std::int64_t max_seqlen_q,
                 std::int64_t max_seqlen_k) {
  call.cu_seqlens_q = cu_seqlens_q, call.cu_seqlens_k = cu_seqlens_k;
  call.max_seqlen_q = max_seqlen_q, call.max_seqlen_k = max_seqlen_k;
}

/// Returns [out, softmax_lse, p, rng_state].
Tensors run_forward(Call& call, const OptionalTensor& out, bool return_softmax) {
  call.return_softmax = return_softmax;
  check_return_softmax(call);
  call.rng_state = draw_rng_state(call);
  const auto result = forward(call, tensor_or_none(out));
  return {result.out, result.softmax_lse, result.s_dmask, reported_rng_state(call)};
}

/// Returns [dq, dk, dv, softmax_d].
Tensors run_backward(Call& call, const Saved& saved, const OptionalTensor& dq, const OptionalTensor& dk,
                     const OptionalTensor& dv, const OptionalTensor& rng_state) {
  call.rng_state = tensor_or_none(rng_state);
  Gradients grads{tensor_or_none(dq), tensor_or_none(dk), tensor_or_none(dv), {}, {}};
  const auto softmax_d = backward(call, saved, grads);
  return {grads.dq, grads.dk, grads.dv, softmax_d};
}

Tensors fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out_,
            const OptionalTensor& alibi_slopes_, double p_dropout, double softmax_scale, bool is_causal,
            std::int64_t window_size_left, std::int64_t window_size_right, double softcap, bool return_softmax,
            const py::object& gen_) {
  refuse_generator(gen_);
  py::gil_scoped_release no_gil;
  RECORD_FUNCTION("flash_attn_2_cuda::fwd", {});
  Call call = make_call(q, k, v, alibi_slopes_,
                        {p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap});
  return run_forward(call, out_, return_softmax);
}

Tensors varlen_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out_,
                   const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                   const OptionalTensor& leftpad_k_, const OptionalTensor& block_table_,
                   const OptionalTensor& alibi_slopes_, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                   double p_dropout, double softmax_scale, bool /*zero_tensors*/, bool is_causal,
                   std::int64_t window_size_left, std::int64_t window_size_right, double softcap, bool return_softmax,
                   const py::object& gen_, std::int64_t num_splits) {
  refuse_generator(gen_);
  py::gil_scoped_release no_gil;
  RECORD_FUNCTION("flash_attn_2_cuda::varlen_fwd", {});
  TORCH_CHECK(num_splits <= 1 || !block_table_.has_value(),
              "flash_attn: num_splits > 1 is not supported with "
              "block_table, got num_splits = ",
              num_splits, "; pass 0 or 1");
  Call call = make_call(q, k, v, alibi_slopes_,
                        {p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap});
  call.seqused_k = tensor_or_none(seqused_k), call.leftpad_k = tensor_or_none(leftpad_k_);
  call.block_table = tensor_or_none(block_table_), call.num_splits = num_splits;
  set_lengths(call, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  return run_forward(call, out_, return_softmax);
}

// `deterministic` asks for nothing more: no backend of this build has a nondeterministic backward pass.
Tensors bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
            const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq_, const OptionalTensor& dk_,
            const OptionalTensor& dv_, const OptionalTensor& alibi_slopes_, double p_dropout, double softmax_scale,
            bool is_causal, std::int64_t window_size_left, std::int64_t window_size_right, double softcap,
            bool /*deterministic*/, const py::object& gen_, const OptionalTensor& rng_state) {
  refuse_generator(gen_);
  py::gil_scoped_release no_gil;
  RECORD_FUNCTION("flash_attn_2_cuda::bwd", {});
  Call call = make_call(q, k, v, alibi_slopes_,
                        {p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap});
  return run_backward(call, {dout, out, softmax_lse, {}}, dq_, dk_, dv_, rng_state);
}

Tensors varlen_bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq_,
                   const OptionalTensor& dk_, const OptionalTensor& dv_, const at::Tensor& cu_seqlens_q,
                   const at::Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes_, std::int64_t max_seqlen_q,
                   std::int64_t max_seqlen_k, double p_dropout, double softmax_scale, bool /*zero_tensors*/,
                   bool is_causal, std::int64_t window_size_left, std::int64_t window_size_right, double softcap,
                   bool /*deterministic*/, const py::object& gen_, const OptionalTensor& rng_state) {
  refuse_generator(gen_);
  py::gil_scoped_release no_gil;
  RECORD_FUNCTION("flash_attn_2_cuda::varlen_bwd", {});
  Call call = make_call(q, k, v, alibi_slopes_,
                        {p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap});
  set_lengths(call, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  return run_backward(call, {dout, out, softmax_lse, {}}, dq_, dk_, dv_, rng_state);
}

/// `run` on the cache call of these arguments and out_.
template <auto run>
auto with_cache(const at::Tensor& q, const at::Tensor& kcache, const at::Tensor& vcache, const OptionalTensor& k_,
                const OptionalTensor& v_, const OptionalTensor& seqlens_k_, const OptionalTensor& rotary_cos_,
                const OptionalTensor& rotary_sin_, const OptionalTensor& cache_batch_idx_,
                const OptionalTensor& leftpad_k_, const OptionalTensor& block_table_,
                const OptionalTensor& alibi_slopes_, const OptionalTensor& out_, double softmax_scale, bool is_causal,
                std::int64_t window_size_left, std::int64_t window_size_right, double softcap,
                bool is_rotary_interleaved, std::int64_t num_splits) {
  CacheCall cache;
  cache.call = make_call(q, kcache, vcache, alibi_slopes_,
                         {0.0, softmax_scale, is_causal, window_size_left, window_size_right, softcap});
  cache.call.seqused_k = tensor_or_none(seqlens_k_), cache.call.cache_batch_idx = tensor_or_none(cache_batch_idx_);
  cache.call.leftpad_k = tensor_or_none(leftpad_k_), cache.call.block_table = tensor_or_none(block_table_);
  cache.call.num_splits = num_splits;
  cache.k_new = tensor_or_none(k_), cache.v_new = tensor_or_none(v_);
  cache.rotary_cos = tensor_or_none(rotary_cos_), cache.rotary_sin = tensor_or_none(rotary_sin_);
  cache.rotary_interleaved = is_rotary_interleaved;
  return run(cache, tensor_or_none(out_));
}

/// Returns [out, softmax_lse].
Tensors fwd_kvcache(const CacheCall& cache, const at::Tensor& out) {
  py::gil_scoped_release no_gil;
  RECORD_FUNCTION("flash_attn_2_cuda::fwd_kvcache", {});
  const auto result = forward_with_cache(cache, out);
  return {result.out, result.softmax_lse};
}

py::dict as_dict(const Explanation& explanation) {
  py::dict result;
  result["backend"] = explanation.backend;
  result["kernel"] = explanation.kernel;
  result["instruction_set"] = explanation.instruction_set;
  result["tile"] = explanation.tile;
  result["reasons"] = explanation.reasons;
  return result;
}

py::dict explain_kvcache(const CacheCall& cache, const at::Tensor& /*out*/) {
  return as_dict(explain(with_contiguous_rows(cache)));
}

py::dict explain_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& cu_seqlens_q,
                      const OptionalTensor& cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                      double dropout_p, double softmax_scale, bool causal, std::int64_t window_size_left,
                      std::int64_t window_size_right, double softcap, const OptionalTensor& alibi_slopes,
                      const OptionalTensor& attn_bias, const OptionalTensor& attn_mask,
                      const OptionalTensor& learnable_sink, const OptionalTensor& key_begin,
                      const OptionalTensor& key_end, const OptionalTensor& block_table, const OptionalTensor& seqused_k,
                      const OptionalTensor& leftpad_k, bool return_softmax, bool backward_pass) {
  Call call = make_call(q, k, v, alibi_slopes,
                        {dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap});
  set_lengths(call, tensor_or_none(cu_seqlens_q), tensor_or_none(cu_seqlens_k), max_seqlen_q, max_seqlen_k);
  call.attn_bias = tensor_or_none(attn_bias), call.attn_mask = tensor_or_none(attn_mask);
  call.learnable_sink = tensor_or_none(learnable_sink);
  call.key_begin = tensor_or_none(key_begin), call.key_end = tensor_or_none(key_end);
  call.block_table = tensor_or_none(block_table);
  call.seqused_k = tensor_or_none(seqused_k), call.leftpad_k = tensor_or_none(leftpad_k);
  return as_dict(explain(call, backward_pass    ? Pass::backward
                               : return_softmax ? Pass::forward_and_s_dmask
                                                : Pass::forward));
}

/// Waits for the lengths to be in host memory and checks them there.
void check_lengths(const at::Tensor& cu_seqlens, bool queries, std::int64_t rows, std::int64_t max_seqlen) {
  const at::Tensor host = cu_seqlens.cpu();
  check_sequence_lengths(view(host, queries ? "cu_seqlens_q" : "cu_seqlens_k", host.device()), queries, rows,
                         max_seqlen);
}

/// Python's exceptions without the C++ stack that c10::Error::what() carries.
void translate(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::NotImplementedError& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

}  // namespace

PYBIND11_MODULE(flash_attn_2_cuda, m) {
  using py::arg;
  py::register_exception_translator(translate);
  m.doc() =
      "Raw attention functions with upstream flash_attn_2_cuda's positional arguments, on every backend of this build.";
  m.attr("_built_for_torch") = TORCH_VERSION;
  m.def(
      "_core_version", [] { return kVersion; }, "Version of the core library's interface that this was compiled with.");

  m.def("fwd", &fwd, "Forward pass, dense: [out, softmax_lse, p, rng_state].", arg("q"), arg("k"), arg("v"),
        arg("out_"), arg("alibi_slopes_"), arg("p_dropout"), arg("softmax_scale"), arg("is_causal"),
        arg("window_size_left"), arg("window_size_right"), arg("softcap"), arg("return_softmax"), arg("gen_"));
  m.def("varlen_fwd", &varlen_fwd, "Forward pass, varlen: [out, softmax_lse, p, rng_state].", arg("q"), arg("k"),
        arg("v"), arg("out_"), arg("cu_seqlens_q"), arg("cu_seqlens_k"), arg("seqused_k"), arg("leftpad_k_"),
        arg("block_table_"), arg("alibi_slopes_"), arg("max_seqlen_q"), arg("max_seqlen_k"), arg("p_dropout"),
        arg("softmax_scale"), arg("zero_tensors"), arg("is_causal"), arg("window_size_left"), arg("window_size_right"),
        arg("softcap"), arg("return_softmax"), arg("gen_"), arg("num_splits") = 0);
  m.def("bwd", &bwd, "Backward pass, dense: [dq, dk, dv, softmax_d].", arg("dout"), arg("q"), arg("k"), arg("v"),
        arg("out"), arg("softmax_lse"), arg("dq_"), arg("dk_"), arg("dv_"), arg("alibi_slopes_"), arg("p_dropout"),
        arg("softmax_scale"), arg("is_causal"), arg("window_size_left"), arg("window_size_right"), arg("softcap"),
        arg("deterministic"), arg("gen_"), arg("rng_state"));
  m.def("varlen_bwd", &varlen_bwd, "Backward pass, varlen: [dq, dk, dv, softmax_d].", arg("dout"), arg("q"), arg("k"),
        arg("v"), arg("out"), arg("softmax_lse"), arg("dq_"), arg("dk_"), arg("dv_"), arg("cu_seqlens_q"),
        arg("cu_seqlens_k"), arg("alibi_slopes_"), arg("max_seqlen_q"), arg("max_seqlen_k"), arg("p_dropout"),
        arg("softmax_scale"), arg("zero_tensors"), arg("is_causal"), arg("window_size_left"), arg("window_size_right"),
        arg("softcap"), arg("deterministic"), arg("gen_"), arg("rng_state"));
  const auto define_with_cache = [&](const char* name, auto function, const char* doc) {
    m.def(name, function, doc, arg("q"), arg("kcache"), arg("vcache"), arg("k_"), arg("v_"), arg("seqlens_k_"),
          arg("rotary_cos_"), arg("rotary_sin_"), arg("cache_batch_idx_"), arg("leftpad_k_"), arg("block_table_"),
          arg("alibi_slopes_"), arg("out_"), arg("softmax_scale"), arg("is_causal"), arg("window_size_left"),
          arg("window_size_right"), arg("softcap"), arg("is_rotary_interleaved"), arg("num_splits"));
  };
  define_with_cache("fwd_kvcache", &with_cache<fwd_kvcache>,
                    "Forward pass over a cache, appending to it first: [out, softmax_lse].");
  define_with_cache("_explain_kvcache", &with_cache<explain_kvcache>, "As _explain, of fwd_kvcache.");
  m.def("_explain", &explain_call, "Backend, kernel, instruction_set, tile and reasons of a call, without running it.",
        arg("q"), arg("k"), arg("v"), arg("cu_seqlens_q"), arg("cu_seqlens_k"), arg("max_seqlen_q"),
        arg("max_seqlen_k"), arg("dropout_p"), arg("softmax_scale"), arg("causal"), arg("window_size_left"),
        arg("window_size_right"), arg("softcap"), arg("alibi_slopes"), arg("attn_bias"), arg("attn_mask"),
        arg("learnable_sink"), arg("key_begin"), arg("key_end"), arg("block_table"), arg("seqused_k"), arg("leftpad_k"),
        arg("return_softmax"), arg("backward"));
  m.def("_check_lengths", &check_lengths, "Raises RuntimeError when cu_seqlens do not describe `rows` packed rows.",
        arg("cu_seqlens"), arg("queries"), arg("rows"), arg("max_seqlen"));
  m.def("_force_cpu_isa", &force_cpu_instruction_set,
        "Debug switch: use that instruction set; \"\" returns to the best.", arg("name"));
  m.def("_cpu_isas", &cpu_instruction_sets,
        "CPU instruction sets of this build that this machine executes, best first.");
  m.def("_cpu_workspace_peak", &cpu_workspace_peak,
        "The most scratch memory that the CPU backend has held at once since the last call of this, in bytes.");
  define_plain_calls(m);
  define_gpu_functions(m);
}

}  // namespace flash_attn::torch_binding
