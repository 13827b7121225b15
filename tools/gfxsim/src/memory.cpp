#include "memory.h"

#include <algorithm>
#include <cstdio>

#include "gfxsim/gfxsim.h"

namespace gfxsim {

void Memory::add(Buffer buffer) {
  if (buffer.begin == buffer.end) return;
  const auto after = std::lower_bound(buffers_.begin(), buffers_.end(), buffer.begin,
                                      [](const Buffer& b, std::uint64_t begin) { return b.end <= begin; });
  if (after != buffers_.end() && after->begin < buffer.end)
    throw Error("buffer '" + buffer.name + "' overlaps the registered buffer '" + after->name + "'");
  buffers_.insert(after, std::move(buffer));
}

void Memory::remove(std::uint64_t begin) {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.begin == begin; });
  if (found == buffers_.end()) throw Error("unregister_buffer: no buffer begins at this address");
  buffers_.erase(found);
}

const Buffer* Memory::find(std::uint64_t address, std::size_t bytes) const {
  const auto found = std::upper_bound(buffers_.begin(), buffers_.end(), address,
                                      [](std::uint64_t value, const Buffer& b) { return value < b.end; });
  if (found == buffers_.end() || address < found->begin || address + bytes > found->end) return nullptr;
  return &*found;
}

std::string Memory::describe(std::uint64_t address, std::size_t bytes) const {
  char text[160];
  const Buffer* nearest = nullptr;
  std::uint64_t distance = ~std::uint64_t(0);
  for (const Buffer& b : buffers_) {
    const std::uint64_t away = address >= b.end ? address - b.end : address < b.begin ? b.begin - address : 0;
    if (away < distance) nearest = &b, distance = away;
  }
  if (!nearest || distance > (std::uint64_t(1) << 32)) {
    std::snprintf(text, sizeof text, "%zu bytes at 0x%llx, near no registered buffer", bytes,
                  (unsigned long long)address);
    return text;
  }
  const char* where = address >= nearest->end    ? "past the end of"
                      : address < nearest->begin ? "before"
                                                 : "across the end of";
  if (address >= nearest->begin && address < nearest->end) distance = address + bytes - nearest->end;
  std::snprintf(text, sizeof text, "%zu bytes at 0x%llx, %llu bytes %s buffer '%.60s' of %llu bytes", bytes,
                (unsigned long long)address, (unsigned long long)distance, where, nearest->name.c_str(),
                (unsigned long long)(nearest->end - nearest->begin));
  return text;
}

}  // namespace gfxsim
