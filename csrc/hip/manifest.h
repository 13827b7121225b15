// The manifest (manifest.def) as a table: every kernel of every target with what a launch needs to know. Host only.
#pragma once

#include <string_view>

#include "core/platform.h"
#include "flash_attn/attention.h"

namespace flash_attn::gpu {

enum class Family : std::uint8_t { forward, backward_delta, backward_dkdv, backward_dk, backward_dv, backward_dq };
enum class Target : std::uint8_t { cdna3, rdna4, cuda };
enum class Variant : std::uint8_t { plain, general };
enum class EngineKind : std::uint8_t { Mfma, Wmma, MmaSync, Fma };

struct KernelRow {
  Family family;
  Target target;
  DType dtype;
  int D, Dv;
  Variant variant;
  EngineKind engine;
  int tile, kept_tiles, waves, streamed_rows, occupancy;
  const char* name;  // The symbol in the code object.

  constexpr int wave() const { return target == Target::cdna3 ? 64 : 32; }
  constexpr int threads() const { return waves * wave(); }
  constexpr int block_rows() const { return waves * kept_tiles * tile; }
  constexpr int element_size() const { return dtype == DType::f32 ? 4 : 2; }
  // LDS of a block: static in AMD code objects, to be passed to the launch on NVIDIA.
  constexpr int lds_bytes() const {
    if (family == Family::backward_delta) return 16;
    const bool fma = engine == EngineKind::Fma, forward = family == Family::forward;
    const int row = D * element_size() + (fma ? 16 : 0), value_row = Dv * element_size() + (fma && !forward ? 16 : 0);
    if (forward) return streamed_rows * (row + value_row) + (fma ? block_rows() * row : 0);
    const int tiles = streamed_rows * (row + value_row) * (fma ? 1 : 2);  // Asynchronous copies take two buffers.
    const int statistics = family == Family::backward_dq ? 0 : 16 * streamed_rows;
    const bool kept_in_lds = fma || kept_tiles * tile * (D + Dv) / 2 > 64 * wave() * (wave() / 32);
    const int kept = block_rows() * (row + (family == Family::backward_dv ? 0 : value_row));
    return tiles + statistics + (kept_in_lds ? kept : 0);
  }
};

constexpr const char* to_string(Family family) {
  switch (family) {
    case Family::forward: return "forward";
    case Family::backward_delta: return "backward_delta";
    case Family::backward_dkdv: return "backward_dkdv";
    case Family::backward_dk: return "backward_dk";
    case Family::backward_dv: return "backward_dv";
    case Family::backward_dq: return "backward_dq";
  }
  return "";
}
// The code object that holds a family's kernels: kernels/<name>.hip.
constexpr const char* object_name(Family family) { return family == Family::forward ? "forward" : "backward"; }

inline constexpr KernelRow kKernels[] = {
#define FA_ROW(family, target, dtype, D, Dv, variant, engine, tile, kept, waves, streamed, occupancy) \
  {Family::family,                                                                                    \
   Target::target,                                                                                    \
   DType::dtype,                                                                                      \
   D,                                                                                                 \
   Dv,                                                                                                \
   Variant::variant,                                                                                  \
   EngineKind::engine,                                                                                \
   tile,                                                                                              \
   kept,                                                                                              \
   waves,                                                                                             \
   streamed,                                                                                          \
   occupancy,                                                                                         \
   "fa_" #family "_" #dtype "_d" #D "_" #variant},
#include "hip/manifest.def"
#undef FA_ROW
};

}  // namespace flash_attn::gpu
