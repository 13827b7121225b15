#include "program.h"

#include <algorithm>
#include <cstring>

#include "disassembler.h"
#include "elf.h"
#include "msgpack.h"
#include "parse.h"

namespace gfxsim {
namespace {

constexpr std::uint64_t kPage = 4096;

void load_image(const ElfFile& elf, Program& program) {
  std::uint64_t bytes = 0;
  for (const ElfSegment& segment : elf.segments) bytes = std::max(bytes, segment.address + segment.memory_bytes);
  program.storage.assign(bytes + kPage, std::byte(0));
  const auto at = reinterpret_cast<std::uintptr_t>(program.storage.data());
  program.image = program.storage.data() + (kPage - at % kPage) % kPage;
  program.image_bytes = bytes;
  for (const ElfSegment& segment : elf.segments)
    std::copy(segment.data.begin(), segment.data.end(), program.image + segment.address);
}

KernelInfo read_info(const Value& kernel) {
  KernelInfo info;
  info.name = kernel[".name"].text;
  info.wavefront_size = int(kernel[".wavefront_size"].number);
  info.kernarg_bytes = std::uint32_t(kernel[".kernarg_segment_size"].number);
  info.lds_bytes = std::uint32_t(kernel[".group_segment_fixed_size"].number);
  info.scratch_bytes = std::uint32_t(kernel[".private_segment_fixed_size"].number);
  info.vgprs = int(kernel[".vgpr_count"].number);
  info.agprs = int(kernel[".agpr_count"].number);
  info.sgprs = int(kernel[".sgpr_count"].number);
  info.vgpr_spills = int(kernel[".vgpr_spill_count"].number);
  info.sgpr_spills = int(kernel[".sgpr_spill_count"].number);
  info.max_workgroup_size = std::uint32_t(kernel[".max_flat_workgroup_size"].number);
  for (const Value& argument : kernel[".args"].list)
    info.arguments.push_back({argument[".name"].text, argument[".value_kind"].text,
                              std::uint32_t(argument[".offset"].number), std::uint32_t(argument[".size"].number)});
  return info;
}

KernelDescriptor read_descriptor(const Program& program, std::uint64_t address) {
  const auto field = [&]<class T>(T, std::uint64_t offset) {
    if (address + offset + sizeof(T) > program.image_bytes)
      throw Error("a kernel descriptor lies outside the code object");
    T value;
    std::memcpy(&value, program.image + address + offset, sizeof value);
    return value;
  };
  KernelDescriptor out;
  out.lds_bytes = field(std::uint32_t(), 0);
  out.scratch_bytes = field(std::uint32_t(), 4);
  out.kernarg_bytes = field(std::uint32_t(), 8);
  out.entry = address + std::uint64_t(field(std::int64_t(), 16));
  out.rsrc3 = field(std::uint32_t(), 44);
  out.rsrc1 = field(std::uint32_t(), 48);
  out.rsrc2 = field(std::uint32_t(), 52);
  out.properties = field(std::uint16_t(), 56);
  out.preload = field(std::uint16_t(), 58);
  return out;
}

void read_kernels(const ElfFile& elf, Program& program) {
  const Value metadata = parse_msgpack(elf.metadata);
  const std::string target = metadata["amdhsa.target"].text;
  const std::string wanted = "amdgcn-amd-amdhsa--" + program.target->name;
  if (target.compare(0, wanted.size(), wanted) != 0 || (target.size() > wanted.size() && target[wanted.size()] != ':'))
    throw WrongTarget("the code object is for '" + target + "', the device is " + program.target->name);
  for (const Value& value : metadata["amdhsa.kernels"].list) {
    Kernel kernel;
    kernel.info = read_info(value);
    const std::string symbol = value[".symbol"].text;
    for (const ElfSymbol& candidate : elf.symbols)
      if (candidate.name == symbol) kernel.descriptor = read_descriptor(program, candidate.value);
    if (!kernel.descriptor.entry) throw Error("kernel " + kernel.info.name + " has no descriptor '" + symbol + "'");
    for (const ElfSymbol& candidate : elf.symbols)
      if (candidate.is_function && candidate.value == kernel.descriptor.entry)
        kernel.end = candidate.value + candidate.size;
    program.kernels.push_back(std::move(kernel));
  }
}

void decode(const ElfFile& elf, Program& program) {
  const std::span<const std::byte> code(program.image + elf.text.address, elf.text.bytes);
  disassemble(program.target->name, code, elf.text.address,
              [&](std::uint64_t pc, std::uint32_t bytes, const std::string& text) {
                program.ops.push_back(parse_instruction(*program.target, text, pc, bytes));
                program.ops.back().index = std::uint32_t(program.ops.size() - 1);
              });
  for (Op& op : program.ops) {
    for (Op& part : op.parts) part.index = op.index;
    if (!op.run || op.opcode->kind != Class::branch || op.operands != 1 || op.operand[0].kind != Kind::constant)
      continue;
    op.target = program.index_of_pc(op.pc + 4 + std::uint64_t(std::int64_t(op.offset0) * 4));
    if (op.target < 0) {
      op.run = nullptr;
      op.unsupported = "branches to where there is no instruction";
    }
  }
}

void count_registers(Program& program) {
  for (Kernel& kernel : program.kernels)
    for (const Op& op : program.ops) {
      if (op.pc < kernel.descriptor.entry || op.pc >= kernel.end) continue;
      for (const RegisterRange& range : op.ranges) {
        const int last = range.first + range.count;
        if (range.kind != Kind::vector || range.first >= kTemporary) continue;
        int& most = range.first < kAgpr0 ? kernel.vectors : kernel.accumulators;
        most = std::max(most, range.first < kAgpr0 ? last : last - kAgpr0);
      }
    }
}

}  // namespace

std::int32_t Program::index_of_pc(std::uint64_t pc) const {
  const auto found =
      std::lower_bound(ops.begin(), ops.end(), pc, [](const Op& op, std::uint64_t value) { return op.pc < value; });
  return found != ops.end() && found->pc == pc ? std::int32_t(found - ops.begin()) : -1;
}

const Kernel& Program::find(std::string_view name) const {
  std::string known;
  for (const Kernel& kernel : kernels) {
    if (kernel.info.name == name) return kernel;
    known += (known.empty() ? "" : ", ") + kernel.info.name;
  }
  throw Error("no kernel '" + std::string(name) + "' in this code object; it holds: " + known);
}

Program load_program(const Target& target, std::span<const std::byte> code_object) {
  const ElfFile elf = parse_elf(code_object);
  if (elf.abi_version < 2 || elf.abi_version > 4)
    throw Error("code object ABI version " + std::to_string(elf.abi_version) +
                "; versions 2 to 4 (code objects V4 to V6) can be run");
  if (elf.has_relocations) throw Error("the code object has relocations, which are not modelled");
  if (elf.metadata.empty()) throw Error("the code object has no AMDGPU metadata note");
  Program program;
  program.target = &target;
  load_image(elf, program);
  read_kernels(elf, program);
  decode(elf, program);
  count_registers(program);
  return program;
}

}  // namespace gfxsim
