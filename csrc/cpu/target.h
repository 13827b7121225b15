// A target is what the kernels are compiled for: an instruction set and a multiplicand format. Kernels name no other.
//
//   Simd, Format, Elem, Real   see simd/ and gemm.h
//   kRows                      rows of a strip: with kPanelVectors it fills the registers with accumulators
//   kPanelVectors              vectors side by side in a panel; kPanel its columns
//   kTall                      see TallStrips
//   kPortable                  compiled for everything and measured nowhere: loops come in few variants
//   Tiles, kTiled              tile registers, where the micro-kernel works in them (tiles.h)
//   kDirectTiles               tiles for forward's direct approach alone (direct_tiles.h)
//   kParts, kSize              elements that make a number (Bf16Parts), and their bytes
//   kDepth, kWidth             packed operands are padded with zeros to multiples of them, in k and in columns;
//                              kWidth is a multiple of kDepth, since columns of scores become k
#pragma once

#include "cpu/gemm.h"
#include "cpu/simd/portable.h"
#include "cpu/tiles.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/simd/avx2.h"
#endif
#if defined(__AVX512F__)
#include "cpu/simd/avx512.h"
#endif
#if defined(FLASH_ATTN_ARM64)
#include "cpu/simd/neon.h"
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "cpu/simd/neon_bf16.h"
#endif

namespace flash_attn::cpu {

template <class SimdT, class FormatT, int Rows, int PanelVectors, class TilesT = NoTiles>
struct Target {
  using Simd = SimdT;
  using Format = FormatT;
  using Elem = typename FormatT::Elem;
  using Real = typename FormatT::Real;
  static constexpr int kRows = Rows;
  static constexpr int kPanelVectors = PanelVectors;
  static constexpr int kPanel = PanelVectors * SimdT::W;
  static constexpr bool kPortable = std::is_same_v<SimdT, PortableSimd<Real, SimdT::W>>;
  using Tiles = TilesT;
  static constexpr bool kTiled = TilesT::kOfBlocks, kDirectTiles = TilesT::kOfRows;
  static constexpr bool kTall = !kTiled && SimdT::W == 16 && (Rows > PanelVectors);
  static constexpr int kParts = Format::kParts;
  static constexpr index_t kSize = sizeof(Elem) * kParts;
  static constexpr index_t kDepth = kTiled ? kTileDepth : FormatT::kStep;
  static constexpr index_t kWidth = kTiled || kDirectTiles ? kTileBlock : SimdT::W;
};

// As many accumulators in strips of twice as many rows and half as many vectors, where registers make squares: an
// operand that is read from L2 serves twice as many rows, and columns that fill no panel are fewer.
template <class T>
using TallStrips =
    std::conditional_t<!T::kTiled && T::Simd::W == 16 && T::kRows == T::kPanelVectors,
                       Target<typename T::Simd, typename T::Format, 2 * T::kRows, T::kPanelVectors / 2>, T>;

using Portable32 = Target<PortableSimd<float, 8>, Scalars<PortableSimd<float, 8>>, 4, 1>;
using Portable64 = Target<PortableSimd<double, 4>, Scalars<PortableSimd<double, 4>>, 4, 1>;
#if defined(__AVX2__) && defined(__FMA__)
using Avx2 = Target<Avx2Simd, Scalars<Avx2Simd>, 6, 2>;
#endif
#if defined(FLASH_ATTN_ARM64)
using Neon = Target<NeonSimd, Scalars<NeonSimd>, 4, 4>;
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
using NeonBf16 = Target<NeonSimd, NeonBf16Pairs, 4, 4>;
#endif
#if defined(__AVX512F__)
using Avx512 = Target<Avx512Simd, Scalars<Avx512Simd>, 4, 4>;
#endif
#if defined(__AVX512BF16__)
using Avx512Bf16 = Target<Avx512Simd, Bf16Pairs, 4, 4>;
template <int Parts>
using Bf16Multiplicands = std::conditional_t<Parts == 1, Bf16OfTiles, Bf16Parts<Parts>>;
// Numbers of 1, 2 or 3 bf16: what bf16, fp16 and fp32 take.
template <int Parts>
using EmulatedAmxBf16 = Target<Avx512Simd, Bf16Multiplicands<Parts>, kTileBlock, 2, EmulatedTiles>;
using EmulatedDirectTiles = Target<Avx512Simd, Bf16Pairs, kTileBlock, 1, RowTiles<EmulatedTiles>>;
#endif
#if defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
template <int Parts>
using AmxBf16 = Target<Avx512Simd, Bf16Multiplicands<Parts>, kTileBlock, 2, AmxTiles>;
using AmxDirectTiles = Target<Avx512Simd, Bf16Pairs, kTileBlock, 1, RowTiles<AmxTiles>>;
#endif

// What problems are stored as whose numbers are products of so many bf16.
template <class Target>
using StoredAs =
    std::conditional_t<Target::kParts == 1, BFloat16, std::conditional_t<Target::kParts == 2, Half, float>>;

// How K and V reach the forward pass's products, by the rows that meet them per key head.
//   packed    many rows: K and V of a unit are packed once, for every query block to use
//   in_place  few: who needs a key block packs it, and all query heads of the group meet it
//   direct    very few, as in decoding: rows of K and V are read where they are, nothing is packed
enum class Approach { packed, in_place, direct };

// Tile sizes of a problem. They may change speed and the order of sums, and depend on the shape alone.
struct Tiles {
  index_t queries, keys;
};

// Key blocks start at multiples of 64, which the dropout bits rely on, and keep their K and V (forward) or K, V, dK,
// dV (backward) in half of a 1 MB L2.
inline constexpr index_t kKeyAlign = 64;

// Blocks of queries are this many, times or over a power of two. All rows of a strip are multiplied: of six rows, too,
// blocks are whole strips, also when halved.
inline constexpr index_t kQueryAlign = 128;
FA_INLINE constexpr index_t query_align(index_t strip_rows) {
  return kQueryAlign % strip_rows == 0 ? kQueryAlign : kQueryAlign / 4 * 3;
}

// Most keys of a block that is packed where it is used: as many as the ranges that are merged have.
inline constexpr index_t kInPlaceKeys = 1024;

// Keys of a block that is read where it is: few, so that the scores of all heads that meet it stay in the cache.
inline constexpr index_t kDirectKeys = 128;

// Rows of K or V whose addresses are known beyond a block of keys that is read where it is: as many as it has and one,
// to be asked for ahead of their turn, those that are asked for between K and V (forward_direct.h), as many as memory
// gives in the time that weights take, and some to be asked for in part before that.
inline constexpr index_t kRowsBetween = kDirectKeys / 16, kFarRows = 24;
inline constexpr index_t kRowsAhead = kDirectKeys + 1 + kRowsBetween + kFarRows;

// Most keys of a block that strips of rows meet: their scores fit in L1, if just so. Each block of keys costs a strip
// some reductions and waiting for them. In tiles, scores of a part of a block are in memory at a time
// (forward_tiled.h).
FA_INLINE constexpr index_t most_strip_keys(index_t strip_rows) {
  index_t keys = 2048;
  while (strip_rows < kTileBlock && keys * strip_rows > 8192) keys /= 2;
  return keys;
}

// From a row of a strip's scores to the next, and of its probabilities, unless direct. Constants, so that loops that
// read and write several rows need a register for one address. 4 KB apart, six rows of fp32 would take six of the eight
// ways of each set of L1, through which V passes; four such rows of a Zen 4 gain nothing by other pitches.
template <class Target>
using StripPitch = std::integral_constant<index_t, most_strip_keys(Target::kRows) + (Target::Simd::W < 16 ? 16 : 0)>;
template <class Target>
using ScorePitch = std::integral_constant<index_t, Target::kTiled ? 64 : StripPitch<Target>::value>;
template <class Target>
using ProbabilityPitch =
    std::integral_constant<index_t, Target::kTiled ? Target::kParts == 1 ? 256 : 128 : StripPitch<Target>::value>;

// From first: whether all queries see keys from the first one on, wherever their blocks begin.
FA_INLINE Tiles forward_tiles(Approach approach, index_t D, index_t Dv, index_t elem_size, index_t strip_rows,
                              bool from_first) {
  if (approach == Approach::direct) return {kQueryAlign, kDirectKeys};
  constexpr index_t kLong = 768, kManyQueries = 4 * kQueryAlign;
  const index_t bytes = (D + Dv) * elem_size, keys = (index_t(512) << 10) / bytes / kKeyAlign * kKeyAlign;
  const index_t strip = most_strip_keys(strip_rows);
  const index_t longest = approach == Approach::in_place ? min_of(kInPlaceKeys, strip) : strip;
  // Tiles are quicker than L3 and memory, from which long rows of K and V come, for each block of queries again. Where
  // key blocks begin may depend on no more than query_align of them.
  const bool far = strip_rows == kTileBlock && bytes >= kLong && from_first;
  const index_t aligned = query_align(strip_rows),
                queries = from_first && aligned < kQueryAlign ? 2 * aligned : aligned;
  return {far ? kManyQueries : queries, max_of<index_t>(128, min_of(keys, longest))};
}

// Small head dims have room for long blocks of queries, whose products are long loops; but P and dS of a strip, which
// hold all queries of a block, stay in L1 (tiles' are of all parts of numbers), and what is added to its scores, where
// queries have rows of that, in L2. More queries than products of fp32 and fp64 sum at a time are several whole sums,
// into which backward_plan.h can cut a block; bf16 and tiles sum all of a block. Processors with tiles have 2 MB of L2,
// whatever numbers their multiplicands make. Strips of six rows are whole in blocks of 192 keys, and up to a head dim
// of 256 a Zen 3, with 512 KB of L2, is faster the larger its blocks (docs/cpu-avx2.md).
FA_INLINE Tiles backward_tiles(index_t D, index_t Dv, index_t elem_size, index_t strip_rows, bool addend_per_query) {
  constexpr index_t kOfBf16 = sizeof(BFloat16);
  const bool tiled = strip_rows == kTileBlock;
  const index_t rows = (index_t(64) << 10) / (max_of(D, Dv) * (tiled ? kOfBf16 : elem_size)) / kKeyAlign * kKeyAlign;
  const index_t in_l1 = tiled ? (index_t(16) << 10) / (kTileBlock * elem_size) / kKeyAlign * kKeyAlign : 512;
  const index_t most_queries = addend_per_query ? min_of<index_t>(in_l1, 256) : in_l1;
  const bool sums_parts = !tiled && elem_size > kOfBf16 && rows > kScalarsPerSum;
  const bool sixes = query_align(strip_rows) < kQueryAlign && rows > 0;
  const index_t queries = min_of(sums_parts ? rows / kScalarsPerSum * kScalarsPerSum : rows, most_queries);
  return {max_of<index_t>(sixes ? kScalarsPerSum : 64, queries),
          sixes ? 2 * query_align(strip_rows) : max_of<index_t>(64, min_of<index_t>(rows, 256))};
}

}  // namespace flash_attn::cpu
