// Scratch memory of a call. One block, carved into arrays; a thread keeps a small one for its next call.
#pragma once

#include <cstddef>

#include "core/platform.h"

namespace flash_attn::cpu {

inline constexpr index_t kCacheLine = 64;

// Adds up what a plan needs, then hands out the parts of a block in the same order.
class Carver {
 public:
  FA_INLINE explicit Carver(char* base = nullptr) : base_(base) {}

  template <class T>
  FA_INLINE T* take(index_t count) {
    char* const part = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count * index_t(sizeof(T)), kCacheLine);
    return reinterpret_cast<T*>(part);
  }
  FA_INLINE index_t used() const { return used_; }

 private:
  char* base_;
  index_t used_ = 0;
};

/// At least `bytes` bytes, aligned to a cache line, contents undefined. Throws std::bad_alloc.
class Workspace {
 public:
  // Whether the thread's own block may be taken, which is better left to the larger one of two.
  enum class Keep { yes, no };
  explicit Workspace(index_t bytes, Keep keep = Keep::yes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  FA_INLINE char* data() const { return data_; }

 private:
  char* data_;
  index_t bytes_;
  bool kept_;  // The calling thread's own block, not to be freed here.
};

}  // namespace flash_attn::cpu
