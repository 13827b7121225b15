#include "cpu/cpuid.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(FLASH_ATTN_X86)
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(FLASH_ATTN_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(FLASH_ATTN_ARM64) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace flash_attn::cpu {
namespace {

std::atomic<int> supposed_core{-1};  // By a test; negative: by none.

}  // namespace

void suppose_core(Core core) { supposed_core = static_cast<int>(core); }

#if defined(FLASH_ATTN_X86)
namespace {

struct Registers {
  std::uint32_t a, b, c, d;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
#if defined(_MSC_VER)
  int r[4];
  __cpuidex(r, static_cast<int>(leaf), static_cast<int>(subleaf));
  return {std::uint32_t(r[0]), std::uint32_t(r[1]), std::uint32_t(r[2]), std::uint32_t(r[3])};
#else
  Registers r{};
  __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
  return r;
#endif
}

// XCR0: the register state that the operating system saves. A processor's feature bit alone is not enough.
std::uint64_t saved_state() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t(high) << 32 | low;
#endif
}

bool made_by(const char* vendor) {
  const Registers r = cpuid(0, 0);
  const std::uint32_t words[] = {r.b, r.d, r.c};
  return std::memcmp(words, vendor, sizeof(words)) == 0;
}

// AMD's VDPBF16PS takes as long as an fp32 multiply-add and does twice the work. Intel's loses to fp32: a Xeon with
// AMX, 2 threads, forward with D = 128, did 162 GFLOP/s in bf16 by VDPBF16PS and 261 in fp32 by FMA.
bool made_by_intel() { return made_by("GenuineIntel"); }

bool made_by_amd() {
  static const bool by_amd = made_by("AuthenticAMD");
  return by_amd;
}

// AMD's families, of which Zen 3 (without AVX-512) and 4 are 0x19 and Zen 5 is 0x1a: the base family 15 and the
// extension on top of it.
std::uint32_t family() {
  const std::uint32_t signature = cpuid(1, 0).a;
  return (signature >> 8 & 15) + (signature >> 20 & 255);
}

// Intel's model in family 6: its four bits and the extension above them (Intel SDM volume 2A, CPUID).
std::uint32_t model() {
  const std::uint32_t signature = cpuid(1, 0).a;
  return (signature >> 4 & 15) | (signature >> 12 & 0xf0);
}

Core own_core() {
  constexpr std::uint32_t kSapphireRapids = 0x8f, kEmeraldRapids = 0xcf;
  if (made_by_intel() && family() == 6 && (model() == kSapphireRapids || model() == kEmeraldRapids))
    return Core::golden_cove;
  if (!made_by_amd() || family() < 0x19) return Core::other;
  return family() > 0x19 ? Core::zen5 : Core::zen4;
}

// Intel's cores that have it also have an L2 of 512 KB to 2 MB.
bool has_avx512f() { return cpuid(0, 0).a >= 7 && (cpuid(7, 0).b >> 16 & 1) != 0; }

constexpr std::uint32_t kTileState = 0x60000;  // Of XCR0: how tiles are laid out, and what is in them.

// Tile registers are large, so systems save them only for processes that ask: Linux
// (Documentation/arch/x86/xstate.rst), and Windows since 11 and Server 2022 (winbase.h,
// EnableProcessOptionalXStateFeatures), whose older ones, and Wine, have no such function.
bool tile_registers_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#elif defined(_WIN32)
  using Enable = BOOL(WINAPI*)(DWORD64);
  const HMODULE kernel = GetModuleHandleA("kernel32.dll");
  const auto found = kernel ? GetProcAddress(kernel, "EnableProcessOptionalXStateFeatures") : nullptr;
  const auto enable = reinterpret_cast<Enable>(reinterpret_cast<void*>(found));
  return enable && enable(kTileState) != 0;
#else
  return false;
#endif
}

bool all_bits(std::uint32_t value, std::uint32_t bits) { return (value & bits) == bits; }

}  // namespace

// Bits: Intel SDM volume 2A, CPUID, leaves 1 and 7; volume 1, 13.3 for XCR0.
Features detect_features() {
  Features f;
  if (cpuid(0, 0).a < 7) return f;
  constexpr std::uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
  if (!all_bits(cpuid(1, 0).c, kFma | kOsxsave | kAvx | kF16c)) return f;
  constexpr std::uint32_t kAvxState = 0x6, kAvx512State = 0xe6;
  const auto state = static_cast<std::uint32_t>(saved_state());
  const Registers seven = cpuid(7, 0);
  constexpr std::uint32_t kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  constexpr std::uint32_t kAmx = 1u << 22 | 1u << 24;
  f.avx2 = all_bits(state, kAvxState) && all_bits(seven.b, kAvx2);
  f.avx512 = f.avx2 && all_bits(state, kAvx512State) && all_bits(seven.b, kAvx512);
  f.avx512_bf16 = f.avx512 && seven.a >= 1 && all_bits(cpuid(7, 1).a, 1u << 5);
  f.amx_bf16 = f.avx512_bf16 && all_bits(state, kTileState) && all_bits(seven.d, kAmx) && tile_registers_granted();
  f.bf16_dot_is_fast = f.avx512_bf16 && !made_by_intel();
  return f;
}

bool asks_between_products() { return made_by_amd(); }

bool prefetches_into_l2() {
  static const bool into_l2 = made_by_intel() ? has_avx512f() : made_by_amd() && family() <= 0x19;
  return into_l2;
}

bool idles_at_memory() { return made_by_amd(); }
#else
namespace {
Core own_core() { return Core::other; }

// Linux: Documentation/arch/arm64/elf_hwcaps.rst. Apple: "Determining instruction set characteristics".
[[maybe_unused]] bool has_neon_bf16() {
#if defined(FLASH_ATTN_ARM64) && defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(FLASH_ATTN_ARM64) && defined(__APPLE__)
  int has = 0;
  std::size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}
}  // namespace

Features detect_features() {
  Features f;
  f.neon_bf16 = has_neon_bf16();
  return f;
}
bool asks_between_products() { return false; }
bool prefetches_into_l2() { return false; }
bool idles_at_memory() { return false; }
#endif

Core core() {
  static const Core own = own_core();
  const int told = supposed_core.load(std::memory_order_relaxed);
  return told < 0 ? own : static_cast<Core>(told);
}

bool multiplies_by_adders() { return core() == Core::zen4; }

bool stores_past_caches(std::int64_t bytes, int threads) {
  constexpr std::int64_t kL2 = std::int64_t(1) << 20;  // Of a core of a Zen 4.
  return core() == Core::zen4 && bytes > 2 * kL2 * threads;
}

}  // namespace flash_attn::cpu
