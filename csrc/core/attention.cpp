// The public functions: validate, choose, run.
#include "flash_attn/attention.h"

#include "core/backend.h"
#include "core/rotary.h"
#include "core/thread_pool.h"
#include "core/validate.h"

namespace flash_attn {

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::f32: return "float32";
    case DType::f64: return "float64";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::boolean: return "bool";
  }
  return "unknown";
}

std::int64_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64: return 8;
    case DType::boolean: return 1;
  }
  return 0;
}

const Backend& choose_backend(Device device, std::vector<std::string>* reasons) {
  // The tensors say where they live, and that decides: nothing is ever copied to another device or falls back in
  // silence.
  switch (device) {
    case Device::cpu:
      if (reasons) reasons->push_back("the tensors are on the CPU, so the CPU backend computes them");
      return cpu_backend();
    case Device::gpu:
      if (reasons) reasons->push_back("the tensors are on a GPU, so the GPU backend computes them");
      return gpu_backend();
  }
  throw NotSupported("flash_attn: no backend of this build computes on that device; available: cpu, gpu");
}

void check_problem(const AttentionProblem& problem) {
  AttentionProblem complete = problem;
  std::int64_t any_state[2] = {};
  if (!problem.rng_state.given()) complete.rng_state = {any_state, DType::i64, problem.q.device, 1, {2}, {1}};
  validate(complete);
}

void attention_forward(const ForwardArgs& args, const Executor& executor) {
  const ForwardProblem problem = validate(args);
  choose_backend(problem.problem.device, nullptr).forward(problem, executor);
}

void attention_with_cache(const CacheArgs& args, const Executor& executor) {
  const CacheProblem problem = validate(args);
  choose_backend(problem.forward.problem.device, nullptr).forward_with_cache(problem, executor);
}

void attention_backward(const BackwardArgs& args, const Executor& executor) {
  const BackwardProblem problem = validate(args);
  choose_backend(problem.problem.device, nullptr).backward(problem, executor);
}

void apply_rotary(const RotaryArgs& args, const Executor& executor) {
  const RotaryProblem problem = validate(args);
  choose_backend(problem.device, nullptr).rotate(problem, executor);
}

namespace {

Explanation explain(const Problem& problem, Pass pass, const Executor& executor) {
  std::vector<std::string> reasons;
  const Backend& backend = choose_backend(problem.device, &reasons);
  Explanation explanation = backend.explain(problem, pass, executor);
  explanation.reasons.insert(explanation.reasons.begin(), reasons.begin(), reasons.end());
  return explanation;
}

}  // namespace

Explanation explain(const AttentionProblem& request, Pass pass, const Executor& executor) {
  return explain(validate(request), pass, executor);
}

Explanation explain(const CacheArgs& args, const Executor& executor) {
  return explain(validate_inputs(args).forward.problem, Pass::forward, executor);
}

}  // namespace flash_attn
