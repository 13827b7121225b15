// Something that is made by whoever needs it first, while others wait.
#pragma once

#include <atomic>
#include <thread>

#include "core/platform.h"

namespace flash_attn::cpu {

class OnDemand {
 public:
  // Makes it if nobody has begun to. Then, or after await(), it is there.
  template <class Make>
  FA_INLINE void begin(const Make& make) {
    State none = State::none;
    if (state_.load(std::memory_order_acquire) != State::none) return;
    if (!state_.compare_exchange_strong(none, State::begun, std::memory_order_acquire)) return;
    make();
    state_.store(State::there, std::memory_order_release);
  }
  FA_INLINE void await() const {
    while (state_.load(std::memory_order_acquire) != State::there) std::this_thread::yield();
  }

 private:
  enum class State { none, begun, there };
  std::atomic<State> state_{State::none};
};

}  // namespace flash_attn::cpu
