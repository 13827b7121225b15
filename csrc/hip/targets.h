// GPUs, as the manifest names them: kinds of targets that share rows, and groups of kinds. Shared by host and device.
#pragma once

#include <cstdint>

namespace flash_attn::gpu {

// gcn: waves of 64 without matrix instructions (gfx908's are not used). cdna: MFMA, waves of 64. rdna2: RDNA 1 and 2,
// waves of 32 without matrix instructions. rdna3, rdna4: WMMA of gfx11 and of gfx12, waves of 32. cuda: sm_80 and
// later.
enum class Target : std::uint8_t { gcn, cdna, rdna2, rdna3, rdna4, cuda };

}  // namespace flash_attn::gpu

// The AMD targets there are kernels for: X(name, kind). cmake/FlashAttnGpu.cmake has the same names.
// clang-format off
#define FA_AMD_TARGETS(X) \
  X(gfx900, gcn) X(gfx906, gcn) X(gfx908, gcn) \
  X(gfx90a, cdna) X(gfx942, cdna) X(gfx950, cdna) \
  X(gfx1010, rdna2) X(gfx1011, rdna2) X(gfx1012, rdna2) \
  X(gfx1030, rdna2) X(gfx1031, rdna2) X(gfx1032, rdna2) X(gfx1034, rdna2) X(gfx1035, rdna2) X(gfx1036, rdna2) \
  X(gfx1100, rdna3) X(gfx1101, rdna3) X(gfx1102, rdna3) X(gfx1103, rdna3) X(gfx1150, rdna3) X(gfx1151, rdna3) \
  X(gfx1200, rdna4) X(gfx1201, rdna4)
// clang-format on

// A row of the manifest for a kind or a group is FA_ROW_OF(kind, ...) for every kind in it.
#define FA_ROWS_gcn(...) FA_ROW_OF(gcn, __VA_ARGS__)
#define FA_ROWS_cdna(...) FA_ROW_OF(cdna, __VA_ARGS__)
#define FA_ROWS_rdna2(...) FA_ROW_OF(rdna2, __VA_ARGS__)
#define FA_ROWS_rdna3(...) FA_ROW_OF(rdna3, __VA_ARGS__)
#define FA_ROWS_rdna4(...) FA_ROW_OF(rdna4, __VA_ARGS__)
#define FA_ROWS_cuda(...) FA_ROW_OF(cuda, __VA_ARGS__)
#define FA_ROWS_fma(...) FA_ROWS_gcn(__VA_ARGS__) FA_ROWS_rdna2(__VA_ARGS__)
#define FA_ROWS_wave64(...) FA_ROWS_gcn(__VA_ARGS__) FA_ROWS_cdna(__VA_ARGS__)
#define FA_ROWS_rdna(...) FA_ROWS_rdna2(__VA_ARGS__) FA_ROWS_rdna3(__VA_ARGS__) FA_ROWS_rdna4(__VA_ARGS__)
#define FA_ROWS_amd(...) FA_ROWS_wave64(__VA_ARGS__) FA_ROWS_rdna(__VA_ARGS__)
#define FA_ROWS_every(...) FA_ROWS_amd(__VA_ARGS__) FA_ROWS_cuda(__VA_ARGS__)
#define FA_ROW(family, targets, ...) FA_ROWS_##targets(family, __VA_ARGS__)
