// Build tool: packs code objects into the archive that the library embeds.
//
//   pack ARCHIVE [TARGET NAME FILE]...
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "hip/runtime/archive.h"
#if defined(FLASH_ATTN_ZSTD)
#include <zstd.h>
#endif

namespace {

using flash_attn::gpu::ArchiveEntry;
using flash_attn::gpu::ArchiveHeader;
using flash_attn::gpu::Codec;

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::string("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Level 19: packed once, unpacked by everyone.
std::vector<char> compress(const std::vector<char>& bytes, Codec& codec) {
#if defined(FLASH_ATTN_ZSTD)
  std::vector<char> packed(ZSTD_compressBound(bytes.size()));
  const std::size_t size = ZSTD_compress(packed.data(), packed.size(), bytes.data(), bytes.size(), 19);
  if (ZSTD_isError(size)) throw std::string(ZSTD_getErrorName(size));
  packed.resize(size);
  codec = Codec::zstd;
  return packed;
#else
  codec = Codec::stored;
  return bytes;
#endif
}

void copy_name(char (&to)[24], const char* from) {
  if (std::strlen(from) >= sizeof(to)) throw std::string("too long a name: ") + from;
  std::strcpy(to, from);
}

void pack(const char* archive, int objects, char** names) {
  ArchiveHeader header{};
  std::memcpy(header.magic, flash_attn::gpu::kArchiveMagic, sizeof(header.magic));
  header.count = static_cast<std::uint32_t>(objects);
  std::vector<ArchiveEntry> entries;
  std::vector<char> data;
  for (int i = 0; i < objects; ++i) {
    ArchiveEntry entry{};
    copy_name(entry.target, names[3 * i]);
    copy_name(entry.name, names[3 * i + 1]);
    const std::vector<char> bytes = read(names[3 * i + 2]);
    const std::vector<char> packed = compress(bytes, entry.codec);
    entry.bytes = bytes.size(), entry.stored_bytes = packed.size();
    entry.offset = sizeof(header) + sizeof(entry) * std::size_t(objects) + data.size();
    data.insert(data.end(), packed.begin(), packed.end());
    entries.push_back(entry);
  }
  std::ofstream file(archive, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&header), sizeof(header));
  file.write(reinterpret_cast<const char*>(entries.data()), std::streamsize(entries.size() * sizeof(ArchiveEntry)));
  file.write(data.data(), std::streamsize(data.size()));
  if (!file.flush()) throw std::string("cannot write ") + archive;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc % 3 != 2) return std::fputs("usage: pack ARCHIVE [TARGET NAME FILE]...\n", stderr), 2;
  try {
    pack(argv[1], (argc - 2) / 3, argv + 2);
  } catch (const std::string& error) {
    return std::fprintf(stderr, "pack: %s\n", error.c_str()), 1;
  }
  return 0;
}
