// A loaded code object: its memory image, kernels and decoded instructions.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "gfxsim/gfxsim.h"
#include "op.h"
#include "target.h"

namespace gfxsim {

// What the hardware and the runtime set up for a kernel: the kernel descriptor (64 bytes in .rodata, symbol <name>.kd).
struct KernelDescriptor {
  std::uint32_t lds_bytes = 0, scratch_bytes = 0, kernarg_bytes = 0;
  std::uint64_t entry = 0;  // virtual address
  std::uint32_t rsrc1 = 0, rsrc2 = 0, rsrc3 = 0;
  std::uint16_t properties = 0, preload = 0;
};

struct Kernel {
  KernelInfo info;
  KernelDescriptor descriptor;
  std::uint64_t end = 0;              // virtual address after the last instruction
  int vectors = 0, accumulators = 0;  // registers that its instructions name: the highest of v and a, plus 1
};

struct Program {
  const Target* target = nullptr;
  std::vector<Kernel> kernels;
  std::vector<Op> ops;             // in order of address
  std::vector<std::byte> storage;  // holds the image, aligned to a page
  std::byte* image = nullptr;      // virtual address 0
  std::uint64_t image_bytes = 0;

  std::uint64_t address_of(std::uint64_t pc) const { return reinterpret_cast<std::uint64_t>(image) + pc; }
  /// Index of the instruction at a memory address or virtual address; -1 when there is none.
  std::int32_t index_at(std::uint64_t address) const {
    return index_of_pc(address - reinterpret_cast<std::uint64_t>(image));
  }
  std::int32_t index_of_pc(std::uint64_t pc) const;
  /// Throws Error listing the kernels there are.
  const Kernel& find(std::string_view kernel) const;
};

/// Throws Error.
Program load_program(const Target& target, std::span<const std::byte> code_object);

}  // namespace gfxsim
