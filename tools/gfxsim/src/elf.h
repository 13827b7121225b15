// The parts of an ELF64 file that a code object uses.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gfxsim {

struct ElfSymbol {
  std::string name;
  std::uint64_t value = 0, size = 0;
  bool is_function = false;
};

struct ElfSegment {
  std::uint64_t address = 0, memory_bytes = 0;
  std::span<const std::byte> data;
};

struct ElfFile {
  std::uint8_t abi_version = 0;
  std::uint32_t flags = 0;
  std::vector<ElfSegment> segments;  // loadable
  std::vector<ElfSymbol> symbols;
  std::span<const std::byte> metadata;  // the AMDGPU note: msgpack
  struct Section {
    std::uint64_t address = 0, bytes = 0;
  } text;
  bool has_relocations = false;
};

/// Throws Error when this is no AMDGPU ELF64 file or it is cut short.
ElfFile parse_elf(std::span<const std::byte> file);

}  // namespace gfxsim
