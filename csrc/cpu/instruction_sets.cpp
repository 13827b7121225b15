#include "cpu/instruction_sets.h"

#include <atomic>
#include <cstdlib>

#include "core/backend.h"

namespace flash_attn {
namespace cpu {

const Features& features() {
  static const Features f = detect_features();
  return f;
}

bool executable(Isa isa) {
#if defined(FLASH_ATTN_X86)
  switch (isa) {
    case kAmxBf16: return features().amx_bf16;
    case kAvx512Bf16: return features().avx512_bf16;
    case kAvx512: return features().avx512;
    case kAvx2: return features().avx2;
    case kAmxBf16Emulated: return kEmulatesTiles && features().avx512_bf16;
    default: return isa == kPortable;
  }
#elif defined(FLASH_ATTN_ARM64)
  return isa == kNeon || isa == kPortable || (isa == kNeonBf16 && features().neon_bf16);
#else
  return isa == kPortable;
#endif
}

Isa best_isa() {
  for (int isa = 0; isa < kIsaCount; ++isa)
    if (executable(Isa(isa)) && (isa != kAvx512Bf16 || features().bf16_dot_is_fast)) return Isa(isa);
  return kPortable;
}

namespace {

Isa isa_named(const std::string& name) {
  if (name.empty()) return best_isa();
  std::string accepted;
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!executable(Isa(isa))) continue;
    if (name == kIsaNames[isa]) return Isa(isa);
    accepted += std::string(accepted.empty() ? "" : ", ") + kIsaNames[isa];
  }
  throw Error(
      "flash_attn: FLASH_ATTN_CPU_ISA (or the forced instruction set) must be one that this build has and this machine "
      "can execute: " +
      accepted + "; got \"" + name + "\"");
}

std::atomic<int> forced_isa{-1};

}  // namespace

Isa current_isa() {
  const int forced = forced_isa.load(std::memory_order_relaxed);
  if (forced >= 0) return Isa(forced);
  const char* const name = std::getenv("FLASH_ATTN_CPU_ISA");
  const Isa isa = isa_named(name ? name : "");
  forced_isa.store(isa, std::memory_order_relaxed);
  return isa;
}

}  // namespace cpu

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (int isa = 0; isa < cpu::kIsaCount; ++isa)
    if (cpu::executable(cpu::Isa(isa))) names.emplace_back(cpu::kIsaNames[isa]);
  return names;
}

void force_cpu_instruction_set(const std::string& name) { cpu::forced_isa.store(cpu::isa_named(name)); }

}  // namespace flash_attn
