// LLVM's disassembler, through its C interface (the same for every LLVM release).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace gfxsim {

/// Calls `visit(address, bytes, text)` for every instruction of `code`, which lies at virtual address `address`. `text`
/// is empty where the bytes are no instruction. Throws Error when this LLVM does not know the target.
void disassemble(const std::string& target, std::span<const std::byte> code, std::uint64_t address,
                 const std::function<void(std::uint64_t, std::uint32_t, std::string)>& visit);

}  // namespace gfxsim
