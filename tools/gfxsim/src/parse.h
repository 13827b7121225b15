// From the disassembler's text of one instruction to an operation.
//
// Text is the key rather than LLVM's opcode numbers or names: it is the same in every LLVM release, it names every
// modifier (LLVM's MCInst holds them as unnamed immediates in an order private to the target), one name stands for all
// encodings of an instruction, and unit checks and reports can be written in it.
#pragma once

#include <string>

#include "op.h"
#include "target.h"

namespace gfxsim {

/// Never throws: what cannot be executed has `unsupported` set, and no handler.
Op parse_instruction(const Target& target, const std::string& text, std::uint64_t pc, std::uint32_t bytes);

/// The mnemonic without suffixes that name an encoding: v_add_f32_e64_dpp becomes v_add_f32.
std::string canonical_name(const std::string& mnemonic);

}  // namespace gfxsim
