#include "elf.h"

#include <cstring>

#include "gfxsim/gfxsim.h"

namespace gfxsim {
namespace {

struct Header {
  std::uint8_t ident[16];
  std::uint16_t type, machine;
  std::uint32_t version;
  std::uint64_t entry, program_offset, section_offset;
  std::uint32_t flags;
  std::uint16_t header_bytes, program_bytes, programs, section_bytes, sections, names;
};
struct ProgramHeader {
  std::uint32_t type, flags;
  std::uint64_t offset, address, physical, file_bytes, memory_bytes, alignment;
};
struct SectionHeader {
  std::uint32_t name, type;
  std::uint64_t flags, address, offset, bytes;
  std::uint32_t link, info;
  std::uint64_t alignment, entry_bytes;
};
struct Symbol {
  std::uint32_t name;
  std::uint8_t info, other;
  std::uint16_t section;
  std::uint64_t value, size;
};
struct NoteHeader {
  std::uint32_t name_bytes, data_bytes, type;
};

constexpr std::uint16_t kMachineAmdgpu = 224;
constexpr std::uint32_t kLoad = 1, kNote = 4, kProgbits = 1, kDynsym = 11, kRela = 4, kRel = 9, kMetadataNote = 32;
constexpr std::uint64_t kExecutable = 4;

class Reader {
 public:
  explicit Reader(std::span<const std::byte> file) : file_(file) {}
  template <class T>
  T at(std::uint64_t offset) const {
    T value;
    std::memcpy(&value, range(offset, sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> range(std::uint64_t offset, std::uint64_t bytes) const {
    if (offset > file_.size() || bytes > file_.size() - offset) throw Error("the code object is cut short");
    return file_.subspan(offset, bytes);
  }
  std::string text(std::uint64_t offset) const {
    const auto rest = range(offset, file_.size() - std::min<std::uint64_t>(offset, file_.size()));
    const auto* begin = reinterpret_cast<const char*>(rest.data());
    return std::string(begin, strnlen(begin, rest.size()));
  }

 private:
  std::span<const std::byte> file_;
};

void read_notes(const Reader& reader, const ProgramHeader& segment, ElfFile& out) {
  const auto padded = [](std::uint64_t bytes) { return (bytes + 3) & ~std::uint64_t(3); };
  for (std::uint64_t at = segment.offset; at + sizeof(NoteHeader) <= segment.offset + segment.file_bytes;) {
    const auto note = reader.at<NoteHeader>(at);
    at += sizeof note;
    if (note.type == kMetadataNote && reader.text(at) == "AMDGPU")
      out.metadata = reader.range(at + padded(note.name_bytes), note.data_bytes);
    at += padded(note.name_bytes) + padded(note.data_bytes);
  }
}

void read_symbols(const Reader& reader, const SectionHeader& table, const SectionHeader& names, ElfFile& out) {
  for (std::uint64_t at = 0; at + sizeof(Symbol) <= table.bytes; at += sizeof(Symbol)) {
    const auto symbol = reader.at<Symbol>(table.offset + at);
    if (symbol.section == 0) continue;
    out.symbols.push_back(
        {reader.text(names.offset + symbol.name), symbol.value, symbol.size, (symbol.info & 15) == 2});
  }
}

}  // namespace

ElfFile parse_elf(std::span<const std::byte> file) {
  const Reader reader(file);
  if (file.size() < sizeof(Header) || std::memcmp(file.data(),
                                                  "\x7f"
                                                  "ELF\2\1",
                                                  6) != 0) {
    if (file.size() > 24 && std::memcmp(file.data(), "__CLANG_OFFLOAD_BUNDLE__", 24) == 0)
      throw Error("this is an offload bundle, not a code object: compile with --no-gpu-bundle-output");
    throw Error("this is not a little-endian ELF64 file");
  }
  const auto header = reader.at<Header>(0);
  if (header.machine != kMachineAmdgpu)
    throw Error("this ELF file is not for AMDGPU (machine " + std::to_string(header.machine) + ")");
  ElfFile out;
  out.abi_version = header.ident[8];
  out.flags = header.flags;
  for (int i = 0; i < header.programs; ++i) {
    const auto segment = reader.at<ProgramHeader>(header.program_offset + std::uint64_t(i) * header.program_bytes);
    if (segment.type == kLoad)
      out.segments.push_back({segment.address, segment.memory_bytes, reader.range(segment.offset, segment.file_bytes)});
    if (segment.type == kNote) read_notes(reader, segment, out);
  }
  for (int i = 0; i < header.sections; ++i) {
    const auto section = reader.at<SectionHeader>(header.section_offset + std::uint64_t(i) * header.section_bytes);
    if (section.type == kProgbits && (section.flags & kExecutable)) out.text = {section.address, section.bytes};
    if ((section.type == kRela || section.type == kRel) && section.bytes) out.has_relocations = true;
    if (section.type == kDynsym) {
      const auto names =
          reader.at<SectionHeader>(header.section_offset + std::uint64_t(section.link) * header.section_bytes);
      read_symbols(reader, section, names, out);
    }
  }
  return out;
}

}  // namespace gfxsim
