// The operator flash_attn::attention_with_kvcache. It has no derivative: as with upstream, results carry no graph.
#include "kvcache.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops.h"
#include "views.h"

namespace flash_attn::torch_binding {

namespace {

CacheArgs inputs_of(const CacheCall& cache) {
  const Call& call = cache.call;
  const at::Device device = call.q.device();
  CacheArgs args;
  args.problem = problem_of(call);
  args.k_new = view(cache.k_new, "k", device);
  args.v_new = view(cache.v_new, "v", device);
  args.rotary_cos = view(cache.rotary_cos, "rotary_cos", device);
  args.rotary_sin = view(cache.rotary_sin, "rotary_sin", device);
  args.rotary_interleaved = cache.rotary_interleaved;
  return args;
}

}  // namespace

Explanation explain(const CacheCall& cache) {
  return calling_core([&] { return flash_attn::explain(inputs_of(cache), CallExecutor(cache.call.q.device())); });
}

CacheCall with_contiguous_rows(CacheCall cache) {
  cache.call.q = contiguous_rows(cache.call.q);
  cache.k_new = contiguous_rows(cache.k_new);
  cache.v_new = contiguous_rows(cache.v_new);
  return cache;
}

ForwardResult forward_with_cache(const CacheCall& cache, const at::Tensor& out) {
  const Call& call = cache.call;
  const at::Device device = call.q.device();
  CacheArgs args = inputs_of(cache);
  const ForwardResult result = allocate_forward(call, out);
  args.out = view(result.out, "out", device);
  args.lse = view(result.softmax_lse, "softmax_lse", device);
  calling_core([&] { attention_with_cache(args, CallExecutor(device)); });
  mark_written(out);
  if (cache.k_new.defined()) {
    mark_written(call.k);
    mark_written(call.v);
  }
  return result;
}

namespace {

CacheCall read_cache_call(const Arguments& arguments) {
  CacheCall cache;
  Call& call = cache.call;
  call.q = arguments.tensor("q"), call.k = arguments.tensor("k_cache"), call.v = arguments.tensor("v_cache");
  call.seqused_k = arguments.tensor("cache_seqlens"), call.leftpad_k = arguments.tensor("cache_leftpad");
  call.cache_batch_idx = arguments.tensor("cache_batch_idx"), call.block_table = arguments.tensor("block_table");
  call.alibi_slopes = arguments.tensor("alibi_slopes");
  call.softmax_scale = arguments["softmax_scale"].toDouble(), call.softcap = arguments["softcap"].toDouble();
  call.causal = arguments["causal"].toBool();
  call.window_left = arguments["window_size_left"].toSymInt();
  call.window_right = arguments["window_size_right"].toSymInt();
  call.num_splits = arguments["num_splits"].toInt();
  cache.k_new = arguments.tensor("k"), cache.v_new = arguments.tensor("v");
  cache.rotary_cos = arguments.tensor("rotary_cos"), cache.rotary_sin = arguments.tensor("rotary_sin");
  cache.rotary_interleaved = arguments["rotary_interleaved"].toBool();
  return cache;
}

void kvcache_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = forward_with_cache(with_contiguous_rows(read_cache_call(Arguments(op, *stack))));
  reply(stack, op, result.out, result.softmax_lse);
}

void kvcache_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto result = allocate_forward(read_cache_call(meta_arguments(op, *stack)).call);
  reply(stack, op, result.out, result.softmax_lse);
}

TORCH_LIBRARY_FRAGMENT(flash_attn, m) {
  m.def(
      "attention_with_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, "
      "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad, "
      "Tensor? block_table, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
      "float softcap, bool rotary_interleaved, Tensor? alibi_slopes, int num_splits) "
      "-> (Tensor out, Tensor softmax_lse)");
}

using Kernel = torch::CppFunction;
TORCH_LIBRARY_IMPL(flash_attn, CPU, m) {
  m.impl("attention_with_kvcache", Kernel::makeFromBoxedFunction<kvcache_kernel>());
}
TORCH_LIBRARY_IMPL(flash_attn, CUDA, m) {
  m.impl("attention_with_kvcache", Kernel::makeFromBoxedFunction<kvcache_kernel>());
}
TORCH_LIBRARY_IMPL(flash_attn, Meta, m) {
  m.impl("attention_with_kvcache", Kernel::makeFromBoxedFunction<kvcache_meta>());
}
TORCH_LIBRARY_IMPL(flash_attn, Autograd, m) { m.impl("attention_with_kvcache", Kernel::makeFallthrough()); }
TORCH_LIBRARY_IMPL(flash_attn, FuncTorchDynamicLayerFrontMode, m) {
  m.impl("attention_with_kvcache", Kernel::makeFromBoxedFunction<refuse_transform>());
}
TORCH_LIBRARY_IMPL(flash_attn, Batched, m) {
  m.impl("attention_with_kvcache", Kernel::makeFromBoxedFunction<refuse_transform>());
}

}  // namespace
}  // namespace flash_attn::torch_binding
