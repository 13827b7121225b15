// What a backend is: it computes valid problems on one kind of device.
#pragma once

#include "core/problem.h"
#include "core/rotary.h"

namespace flash_attn {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual Explanation explain(const Problem& problem, Pass pass, const Executor& executor) const = 0;
  virtual void forward(const ForwardProblem& problem, const Executor& executor) const = 0;
  /// Appends, rotates and attends.
  virtual void forward_with_cache(const CacheProblem& problem, const Executor& executor) const = 0;
  virtual void backward(const BackwardProblem& problem, const Executor& executor) const = 0;
  virtual void rotate(const RotaryProblem&, const Executor&) const {
    throw NotSupported(std::string("flash_attn: the ") + name() +
                       " backend does not support apply_rotary yet; move the tensors to the CPU");
  }
};

const Backend& cpu_backend();
const Backend& gpu_backend();

/// The one place where a backend is chosen. `reasons` (may be null) receives why.
const Backend& choose_backend(Device device, std::vector<std::string>* reasons);

}  // namespace flash_attn
