#include "disassembler.h"

#include <llvm-c/Disassembler.h>
#include <llvm-c/Target.h>

#include <memory>

#include "gfxsim/gfxsim.h"

namespace gfxsim {

void disassemble(const std::string& target, std::span<const std::byte> code, std::uint64_t address,
                 const std::function<void(std::uint64_t, std::uint32_t, std::string)>& visit) {
  static const bool initialised = [] {
    LLVMInitializeAMDGPUTargetInfo();
    LLVMInitializeAMDGPUTarget();
    LLVMInitializeAMDGPUTargetMC();
    LLVMInitializeAMDGPUDisassembler();
    return true;
  }();
  (void)initialised;
  const std::unique_ptr<void, decltype(&LLVMDisasmDispose)> context(
      LLVMCreateDisasmCPU("amdgcn-amd-amdhsa", target.c_str(), nullptr, 0, nullptr, nullptr), &LLVMDisasmDispose);
  if (!context) throw Error("this LLVM has no disassembler for " + target);
  auto* bytes = const_cast<std::uint8_t*>(reinterpret_cast<const std::uint8_t*>(code.data()));
  char text[512];
  for (std::size_t at = 0; at + 4 <= code.size();) {
    const std::size_t used =
        LLVMDisasmInstruction(context.get(), bytes + at, code.size() - at, address + at, text, sizeof text);
    visit(address + at, used ? std::uint32_t(used) : 4, used ? text : "");
    at += used ? used : 4;
  }
}

}  // namespace gfxsim
