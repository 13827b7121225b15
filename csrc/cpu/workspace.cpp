#include "cpu/workspace.h"

#include <new>

namespace flash_attn::cpu {
namespace {

// Fresh memory costs a page fault per 4 KB, more than the arithmetic of a small call. Larger blocks go back at once.
constexpr index_t kKeptBytes = index_t(8) << 20;

char* allocate(index_t bytes) {
  return static_cast<char*>(::operator new(static_cast<std::size_t>(bytes), std::align_val_t(kCacheLine)));
}
void release(char* data) { ::operator delete(data, std::align_val_t(kCacheLine)); }

struct KeptBlock {
  char* data = nullptr;
  index_t bytes = 0;
  bool in_use = false;
  ~KeptBlock() { release(data); }
};
thread_local KeptBlock kept;

}  // namespace

Workspace::Workspace(index_t bytes) : kept_(bytes <= kKeptBytes && !kept.in_use) {
  if (!kept_) {
    data_ = allocate(max_of<index_t>(bytes, 1));
    return;
  }
  if (kept.bytes < bytes) {
    release(kept.data);
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
    release(data_);
}

}  // namespace flash_attn::cpu
