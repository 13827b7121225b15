// Device memory: the registered buffers. An access must lie in one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gfxsim {

struct Buffer {
  std::uint64_t begin = 0, end = 0;
  bool writable = true;
  std::string name;
};

class Memory {
 public:
  /// Throws Error when the range overlaps a registered one.
  void add(Buffer buffer);
  /// Throws Error when no buffer begins at `begin`.
  void remove(std::uint64_t begin);
  /// The buffer that holds all of [address, address + bytes), or null.
  const Buffer* find(std::uint64_t address, std::size_t bytes) const;
  /// Where an address lies, in words: "12 bytes past the end of buffer q (4096 bytes)".
  std::string describe(std::uint64_t address, std::size_t bytes) const;

  const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  std::vector<Buffer> buffers_;  // sorted by address
};

}  // namespace gfxsim
