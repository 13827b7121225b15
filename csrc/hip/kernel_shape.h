// The shape of one kernel, a row of the manifest without its data type's name: what it needs of a GPU. Shared by host
// and device, which assert that it is what the kernel's own code needs.
#pragma once

#include "core/platform.h"
#include "hip/targets.h"

namespace flash_attn::gpu {

enum class Family : std::uint8_t {
  forward,
  backward_delta,
  backward_dkdv,
  backward_dk,
  backward_dv,
  backward_dq,
  forward_dmask,
  append,
  combine,
};
enum class EngineKind : std::uint8_t { Mfma, Wmma, MmaSync, Fma };

struct KernelShape {
  Family family;
  Target target;
  EngineKind engine;
  int element_size, D, Dv, tile, kept_tiles, waves, streamed_rows;

  constexpr int wave() const { return target == Target::gcn || target == Target::cdna ? 64 : 32; }
  constexpr int threads() const { return waves * wave(); }
  constexpr int block_rows() const { return waves * kept_tiles * tile; }
  constexpr int lds_limit() const { return target == Target::cuda ? 163 * 1024 : 64 * 1024; }
  constexpr bool is_fma() const { return engine == EngineKind::Fma; }

  // Families without go through their rows one by one, at any head dim.
  constexpr bool has_tiles() const {
    return family != Family::backward_delta && family != Family::forward_dmask && family != Family::append &&
           family != Family::combine;
  }

  // LDS of a block: static in AMD code objects, to be passed to the launch on NVIDIA.
  constexpr int lds_bytes() const {
    if (!has_tiles()) return 16;
    const bool keeps_one = family == Family::forward || family == Family::backward_dv;
    const int kept = block_rows() * (row_bytes(D) + (keeps_one ? 0 : row_bytes(Dv)));
    if (family == Family::forward)
      return streamed_rows * (row_bytes(D) + Dv * element_size) + (is_fma() || keeps_in_lds() ? kept : 0);
    return backward_tile_bytes() + (keeps_in_lds() ? kept : 0);
  }

  // Kept operands, of which the backward kernels have two besides up to two outputs: in registers, where these take at
  // most 64 (of 256; 128 of CDNA's 512), or else in LDS. Fma's are in LDS in forward; the backward kernels read them
  // from there, or, where LDS does not hold them besides the tiles, from global memory.
  constexpr bool keeps_in_lds() const {
    const bool forward = family == Family::forward;
    if (is_fma())
      return !forward &&
             (streamed_rows + block_rows()) * (row_bytes(D) + row_bytes(Dv)) + 16 * streamed_rows <= lds_limit();
    const int copies = target == Target::rdna3 ? 2 : 1;  // Both halves of a wave hold every operand.
    return kept_tiles * tile * (D + (forward ? 0 : Dv)) / 2 * copies > 64 * wave() * (wave() / 32);
  }

 private:
  // Fma pads rows that are read feature by feature.
  constexpr int row_bytes(int features) const { return features * element_size + (is_fma() ? 16 : 0); }

  // Streamed rows: two buffers for asynchronous copies; a copy for each use, as rows or as columns, for matrix engines
  // of AMD; one for Fma. LSE and delta of streamed queries, in two buffers.
  constexpr int backward_tile_bytes() const {
    const bool dk = family != Family::backward_dv, dv = family != Family::backward_dk,
               dq = family == Family::backward_dq;
    const int copies = is_fma() ? 1 : 2;
    const int first = is_fma() || target == Target::cuda || dk ? copies : 1;
    const int second = is_fma() || target == Target::cuda || (dk && dv && !dq) ? copies : 1;
    return streamed_rows * (first * row_bytes(D) + second * row_bytes(Dv) + (dq ? 0 : 16));
  }
};

}  // namespace flash_attn::gpu
