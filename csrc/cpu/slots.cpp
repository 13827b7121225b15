#include "cpu/slots.h"

namespace flash_attn::cpu {

Slots::Slots(index_t count, int workers) : free_(static_cast<std::size_t>(workers)) {
  for (auto& slots : free_) slots.reserve(static_cast<std::size_t>(count));  // give() does not throw.
  for (index_t slot = count - 1; slot >= 0; --slot) free_[static_cast<std::size_t>(slot % workers)].push_back(slot);
}

Slots::~Slots() = default;

index_t Slots::take(int worker) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t owner = static_cast<std::size_t>(worker);
  while (free_[owner].empty()) owner = (owner + 1) % free_.size();
  const index_t slot = free_[owner].back();
  free_[owner].pop_back();
  return slot;
}

void Slots::give(index_t slot, int worker) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_[static_cast<std::size_t>(worker)].push_back(slot);
}

}  // namespace flash_attn::cpu
