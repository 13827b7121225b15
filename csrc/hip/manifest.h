// The manifest (manifest.def) as a table: every kernel of every target with what a launch needs to know. Host only.
#pragma once

#include <optional>
#include <string_view>

#include "flash_attn/attention.h"
#include "hip/kernel_shape.h"

namespace flash_attn::gpu {

enum class Variant : std::uint8_t { plain, general, cache, decode };

struct KernelRow {
  Family family;
  Target target;
  DType dtype;
  int D, Dv;
  Variant variant;
  EngineKind engine;
  int tile, kept_tiles, waves, streamed_rows, occupancy;
  const char* name;  // The symbol in the code object.

  constexpr int element_size() const { return dtype == DType::f32 ? 4 : 2; }
  constexpr KernelShape shape() const {
    return {family, target, engine, element_size(), D, Dv, tile, kept_tiles, waves, streamed_rows};
  }
  constexpr int wave() const { return shape().wave(); }
  constexpr int threads() const { return shape().threads(); }
  constexpr int block_rows() const { return shape().block_rows(); }
  constexpr int lds_bytes() const { return shape().lds_bytes(); }
};

constexpr const char* to_string(Family family) {
  switch (family) {
    case Family::forward: return "forward";
    case Family::backward_delta: return "backward_delta";
    case Family::backward_dkdv: return "backward_dkdv";
    case Family::backward_dk: return "backward_dk";
    case Family::backward_dv: return "backward_dv";
    case Family::backward_dq: return "backward_dq";
    case Family::forward_dmask: return "forward_dmask";
    case Family::append: return "append";
    case Family::combine: return "combine";
  }
  return "";
}
// The code object that holds a family's kernels: kernels/<name>.hip.
constexpr const char* object_name(Family family) {
  switch (family) {
    case Family::forward:
    case Family::forward_dmask:
    case Family::append:
    case Family::combine: return "forward";
    default: return "backward";
  }
}

inline constexpr KernelRow kKernels[] = {
#define FA_ROW_OF(target, family, dtype, D, Dv, variant, engine, tile, kept, waves, streamed, occupancy) \
  {Family::family,                                                                                       \
   Target::target,                                                                                       \
   DType::dtype,                                                                                         \
   D,                                                                                                    \
   Dv,                                                                                                   \
   Variant::variant,                                                                                     \
   EngineKind::engine,                                                                                   \
   tile,                                                                                                 \
   kept,                                                                                                 \
   waves,                                                                                                \
   streamed,                                                                                             \
   occupancy,                                                                                            \
   "fa_" #family "_" #dtype "_d" #D "_" #variant},
#include "hip/manifest.def"
#undef FA_ROW_OF
};

// The kind of an AMD target such as "gfx942"; nothing where there are no kernels for it.
constexpr std::optional<Target> amd_target(std::string_view name) {
#define FA_KIND_OF(target, kind) \
  if (name == #target) return Target::kind;
  FA_AMD_TARGETS(FA_KIND_OF)
#undef FA_KIND_OF
  return std::nullopt;
}

}  // namespace flash_attn::gpu
