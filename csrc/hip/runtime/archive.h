// The archive of code objects: written by pack.cpp while building, embedded in the library, read by code_objects.cpp.
//
// One header, then `count` entries, then the objects' bytes, each stored or as one zstd frame.
#pragma once

#include <cstdint>

namespace flash_attn::gpu {

enum class Codec : std::uint32_t { stored, zstd };

struct ArchiveHeader {
  char magic[8];
  std::uint32_t count, padding;
};
inline constexpr char kArchiveMagic[8] = {'F', 'A', 'C', 'O', 'D', 'E', '0', '1'};

struct ArchiveEntry {
  char target[24], name[24];
  Codec codec;
  std::uint32_t padding;
  std::uint64_t offset, stored_bytes, bytes;  // Offset from the start of the archive.
};

}  // namespace flash_attn::gpu
