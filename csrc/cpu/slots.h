// Blocks of memory that workers take and give back.
#pragma once

#include <mutex>
#include <vector>

#include "core/platform.h"

namespace flash_attn::cpu {

// Of its own blocks, a worker takes the one that it gave back last, which is in its caches; then those of others.
class Slots {
 public:
  Slots(index_t count, int workers);
  ~Slots();                  // Compiled once: with the kernels it would be compiled for each of their instruction sets.
  index_t take(int worker);  // Callers see to it that one is free.
  void give(index_t slot, int worker);

 private:
  std::mutex mutex_;
  std::vector<std::vector<index_t>> free_;  // Of each worker.
};

}  // namespace flash_attn::cpu
