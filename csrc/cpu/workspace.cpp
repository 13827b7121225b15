#include "cpu/workspace.h"

#include <flash_attn/attention.h>

#include <atomic>
#include <new>
#include <thread>

namespace flash_attn::cpu {
namespace {

// Fresh memory costs a page fault per 4 KB: more than the arithmetic of a small call, and a fifth of a sliding window's
// time. Enough for a wave that is quick to allocate (units.h) and what as many workers as there are processors have for
// themselves; larger blocks go back at once.
index_t kept_bytes() {
  static const index_t bytes = index_t(32 + std::thread::hardware_concurrency()) << 20;
  return bytes;
}

// Bytes of all threads, and the most since somebody asked.
std::atomic<index_t> allocated{0}, peak{0};

char* allocate(index_t bytes) {
  auto* const data = static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), std::align_val_t(kCacheLine)));
  const index_t now = allocated.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  index_t before = peak.load(std::memory_order_relaxed);
  while (before < now && !peak.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
  }
  return data;
}
void release(char* data, index_t bytes) {
  allocated.fetch_sub(bytes, std::memory_order_relaxed);
  ::operator delete(data, std::align_val_t(kCacheLine));
}

struct KeptBlock {
  char* data;
  index_t bytes;
  bool in_use;
};
thread_local KeptBlock kept{nullptr, 0, false};

// Gives the block back when its thread ends. Destructors that run after this one may still call: `kept`, which has
// none, then says that they allocate for themselves.
struct AtThreadExit {
  bool armed = false;  // Who writes to it has the thread make this object.
  ~AtThreadExit() {
    release(kept.data, kept.bytes);
    kept = {nullptr, 0, true};
  }
};
thread_local AtThreadExit at_thread_exit;

}  // namespace

Workspace::Workspace(index_t bytes, Keep keep)
    : bytes_(max_of<index_t>(bytes, 1)), kept_(keep == Keep::yes && bytes <= kept_bytes() && !kept.in_use) {
  if (!kept_) {
    data_ = allocate(bytes_);
    return;
  }
  if (kept.bytes < bytes) {
    at_thread_exit.armed = true;
    release(kept.data, kept.bytes);
    kept.data = nullptr;
    kept.bytes = 0;
    kept.data = allocate(bytes);
    kept.bytes = bytes;
  }
  kept.in_use = true;
  data_ = kept.data;
}

Workspace::~Workspace() {
  if (kept_)
    kept.in_use = false;
  else
    release(data_, bytes_);
}

}  // namespace flash_attn::cpu

std::int64_t flash_attn::cpu_workspace_peak() {
  return cpu::peak.exchange(cpu::allocated.load(std::memory_order_relaxed), std::memory_order_relaxed);
}
