// What a backend is: it computes valid problems on one kind of device.
#pragma once

#include "core/problem.h"

namespace flash_attn {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual Explanation explain(const Problem& problem, Pass pass, const Executor& executor) const = 0;
  virtual void forward(const ForwardProblem& problem, const Executor& executor) const = 0;
  virtual void backward(const BackwardProblem& problem, const Executor& executor) const = 0;
};

const Backend& cpu_backend();
const Backend& gpu_backend();

/// The one place where a backend is chosen. `reasons` (may be null) receives why.
const Backend& choose_backend(const Problem& problem, std::vector<std::string>* reasons);

}  // namespace flash_attn
