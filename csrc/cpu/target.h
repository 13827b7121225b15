// A target is what the kernels are compiled for: an instruction set and a multiplicand format. Kernels name no other.
//
//   Simd, Format, Elem, Real   see simd/ and gemm.h
//   kRows                      rows of a strip: with kPanelVectors it fills the registers with accumulators
//   kPanelVectors              vectors side by side in a panel; kPanel its columns
#pragma once

#include "cpu/gemm.h"
#include "cpu/simd/portable.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/simd/avx2.h"
#endif
#if defined(__AVX512F__)
#include "cpu/simd/avx512.h"
#endif

namespace flash_attn::cpu {

template <class SimdT, class FormatT, int Rows, int PanelVectors>
struct Target {
  using Simd = SimdT;
  using Format = FormatT;
  using Elem = typename FormatT::Elem;
  using Real = typename FormatT::Real;
  static constexpr int kRows = Rows;
  static constexpr int kPanelVectors = PanelVectors;
  static constexpr int kPanel = PanelVectors * SimdT::W;
};

using Portable32 = Target<PortableSimd<float, 8>, Scalars<PortableSimd<float, 8>>, 4, 1>;
using Portable64 = Target<PortableSimd<double, 4>, Scalars<PortableSimd<double, 4>>, 4, 1>;
#if defined(__AVX2__) && defined(__FMA__)
using Avx2 = Target<Avx2Simd, Scalars<Avx2Simd>, 6, 2>;
#endif
#if defined(__AVX512F__)
using Avx512 = Target<Avx512Simd, Scalars<Avx512Simd>, 4, 4>;
#endif
#if defined(__AVX512BF16__)
using Avx512Bf16 = Target<Avx512Simd, Bf16Pairs, 4, 4>;
#endif

// Tile sizes of a problem. They may change speed and the order of sums, and depend on the shape alone.
struct Tiles {
  index_t queries, keys;
};

// Key blocks start at multiples of 64, which the dropout bits rely on, and keep their K and V (forward) or K, V, dK,
// dV (backward) in half of a 1 MB L2.
inline constexpr index_t kKeyAlign = 64;

// Keys of a block that is read where it is: few, so that the next head of the same rows of memory follows soon.
inline constexpr index_t kDirectKeys = 128;

FA_INLINE Tiles forward_tiles(index_t D, index_t Dv, index_t elem_size) {
  const index_t keys = (index_t(512) << 10) / ((D + Dv) * elem_size) / kKeyAlign * kKeyAlign;
  return {128, max_of<index_t>(128, min_of<index_t>(keys, 1024))};
}

FA_INLINE Tiles backward_tiles(index_t D, index_t Dv, index_t elem_size) {
  const index_t keys = (index_t(64) << 10) / (max_of(D, Dv) * elem_size) / kKeyAlign * kKeyAlign;
  const index_t block = max_of<index_t>(64, min_of<index_t>(keys, 256));
  return {block, block};
}

}  // namespace flash_attn::cpu
