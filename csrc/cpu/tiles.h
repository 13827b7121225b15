// AMX-BF16: tiles of 16 rows of 64 bytes, and the micro-kernel that works in them.
//
// A block of C is 32 x 32, four tiles: tile 2 r + c. Its operands are two tiles of A (4, 5) and two of B (6, 7), each
// 32 deep: a tile of A is 16 rows with k contiguous, a tile of B 16 pairs of k by 16 columns, which is how panels are
// packed already. A tile's products are summed by themselves before they join C, so there is no need for
// kStepsPerSum, and tiles that are zero change no bit of C.
#pragma once

#include <atomic>
#include <cstdlib>
#include <iterator>

#include "cpu/gemm.h"

#if defined(__AVX512BF16__)
#include "cpu/simd/avx512.h"
#endif

namespace flash_attn::cpu {

// For targets whose micro-kernel works in vector registers. kBlocks: packed operands meet in blocks of tiles; kRows:
// few rows meet rows of memory as tiles (direct_tiles.h).
struct NoTiles {
  static constexpr bool kOfBlocks = false, kOfRows = false;
  struct Session {
    explicit Session(index_t = 0) {}
  };
};

inline constexpr index_t kTileRows = 16, kTileDepth = 32;  // Numbers of a tile of A.
inline constexpr index_t kTileBytes = 64;                  // Of a row.
inline constexpr index_t kTileBlock = 2 * kTileRows;       // Rows and columns of a block of C.
inline constexpr int kTiles = 8, kShortTiles = 5;          // The first of them may have fewer rows.

// Tile loads read what vectors and scalars wrote, and the other way round, which the compiler is to leave where it was.
FA_INLINE void fence_tiles() { std::atomic_signal_fence(std::memory_order_seq_cst); }

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
// The layout that LDTILECFG reads (Intel SDM volume 2, LDTILECFG).
struct TileConfig {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

// The compiler's intrinsics want literal tile numbers, and do not say what memory they read: hence the switches, and
// fence_tiles.
class AmxTiles {
 public:
  static constexpr bool kOfBlocks = true, kOfRows = false;
  // The tile registers of a thread are set up while one exists, the first kShortTiles with `rows` rows.
  class Session {
   public:
    FA_INLINE explicit Session(index_t rows = kTileRows) {
      alignas(64) TileConfig config{1, 0, {}, {}, {}};
      for (int tile = 0; tile < kTiles; ++tile) {
        config.row_bytes[tile] = kTileBytes;
        config.rows[tile] = static_cast<std::uint8_t>(tile < kShortTiles ? rows : kTileRows);
      }
      fence_tiles();
      _tile_loadconfig(&config);
    }
    FA_INLINE ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    const FlushSubnormals flush_;  // As tile products do.
  };

  template <int Tile>
  FA_INLINE void zero() {
    if constexpr (Tile == 0) _tile_zero(0);
    if constexpr (Tile == 1) _tile_zero(1);
    if constexpr (Tile == 2) _tile_zero(2);
    if constexpr (Tile == 3) _tile_zero(3);
    if constexpr (Tile == 7) _tile_zero(7);
  }
  template <int Tile>
  FA_INLINE void load(const void* from, index_t stride_bytes) {
    if constexpr (Tile == 0) _tile_loadd(0, from, stride_bytes);
    if constexpr (Tile == 1) _tile_loadd(1, from, stride_bytes);
    if constexpr (Tile == 2) _tile_loadd(2, from, stride_bytes);
    if constexpr (Tile == 3) _tile_loadd(3, from, stride_bytes);
    if constexpr (Tile == 4) _tile_loadd(4, from, stride_bytes);
    if constexpr (Tile == 5) _tile_loadd(5, from, stride_bytes);
    if constexpr (Tile == 6) _tile_loadd(6, from, stride_bytes);
    if constexpr (Tile == 7) _tile_loadd(7, from, stride_bytes);
  }
  template <int Tile>
  FA_INLINE void store(void* to, index_t stride_bytes) const {
    if constexpr (Tile == 0) _tile_stored(0, to, stride_bytes);
    if constexpr (Tile == 1) _tile_stored(1, to, stride_bytes);
    if constexpr (Tile == 2) _tile_stored(2, to, stride_bytes);
    if constexpr (Tile == 3) _tile_stored(3, to, stride_bytes);
    if constexpr (Tile == 7) _tile_stored(7, to, stride_bytes);
  }
  // C += A times B: of a block (multiply_strip), and of few rows (direct_tiles.h).
  template <int C, int A, int B>
  FA_INLINE void multiply_add() {
    constexpr int kProduct = 100 * C + 10 * A + B;
    if constexpr (kProduct == 46) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kProduct == 147) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kProduct == 256) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kProduct == 357) _tile_dpbf16ps(3, 5, 7);
    if constexpr (kProduct == 45) _tile_dpbf16ps(0, 4, 5);
    if constexpr (kProduct == 145) _tile_dpbf16ps(1, 4, 5);
    if constexpr (kProduct == 165) _tile_dpbf16ps(1, 6, 5);
    if constexpr (kProduct == 245) _tile_dpbf16ps(2, 4, 5);
    if constexpr (kProduct == 246) _tile_dpbf16ps(2, 4, 6);
    if constexpr (kProduct == 346) _tile_dpbf16ps(3, 4, 6);
    if constexpr (kProduct == 354) _tile_dpbf16ps(3, 5, 4);
    if constexpr (kProduct == 365) _tile_dpbf16ps(3, 6, 5);
    if constexpr (kProduct == 756) _tile_dpbf16ps(7, 5, 6);
  }
};
#endif

#if defined(__AVX512BF16__)
// The same registers and instructions by vectors, for machines that lack them: same loads, stores and order of sums.
// Subnormal numbers are kept, where the instruction takes them as zero.
class EmulatedTiles {
 public:
  static constexpr bool kOfBlocks = true, kOfRows = false;
  class Session {
   public:
    FA_INLINE explicit Session(index_t rows = kTileRows) { rows_of_short_tiles() = rows; }
    FA_INLINE ~Session() { rows_of_short_tiles() = 0; }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    const FlushSubnormals flush_;  // As tile products do.
  };

  template <int Tile>
  FA_INLINE void zero() {
    clear_from<Tile>(0);
  }
  template <int Tile>
  FA_INLINE void load(const void* from, index_t stride_bytes) {
    for (index_t r = 0; r < rows<Tile>(); ++r)
      std::memcpy(tiles_[Tile] + r * kTileBytes, static_cast<const char*>(from) + r * stride_bytes, kTileBytes);
    clear_from<Tile>(rows<Tile>());
  }
  template <int Tile>
  FA_INLINE void store(void* to, index_t stride_bytes) const {
    for (index_t r = 0; r < rows<Tile>(); ++r)
      std::memcpy(static_cast<char*>(to) + r * stride_bytes, tiles_[Tile] + r * kTileBytes, kTileBytes);
  }
  // TDPBF16PS: even and odd k are summed apart, from zero, and then join C (Intel SDM volume 2). Out of line, for the
  // compiler's time: kernels of numbers in parts have many of them.
  template <int C, int A, int B>
  FA_NOINLINE void multiply_add() {
    constexpr index_t kPairs = kTileDepth / 2, kAbreast = 8;
    using V = Avx512Vector;
    const auto *a = elements(A), *b = elements(B);
    float* const c = reinterpret_cast<float*>(tiles_[C]);
    for (index_t first = 0; first < rows<C>(); first += kAbreast) {
      V even[kAbreast], odd[kAbreast];
      for (int r = 0; r < kAbreast; ++r) even[r] = odd[r] = V(0.0f);
      for (index_t k = 0; k < kPairs; ++k) {
        V of_b[2];
        Avx512Simd::split_pairs(Avx512Simd::load_pairs(b + k * kTileDepth), of_b);
        for (int r = 0; r < kAbreast; ++r) {
          const auto* const pair = a + (first + r) * kTileDepth + 2 * k;
          even[r] = fma(V(to_float(pair[0])), of_b[0], even[r]);  // Products of two bf16 are exact.
          odd[r] = fma(V(to_float(pair[1])), of_b[1], odd[r]);
        }
      }
      for (int r = 0; r < kAbreast; ++r) {
        float* const row = c + (first + r) * kTileRows;
        Avx512Simd::store(row, Avx512Simd::load(row) + (even[r] + odd[r]));
      }
    }
  }

 private:
  FA_INLINE const BFloat16* elements(int tile) const { return reinterpret_cast<const BFloat16*>(tiles_[tile]); }
  static FA_INLINE index_t& rows_of_short_tiles() {
    static thread_local index_t rows = 0;
    return rows;
  }
  // Where tiles are not set up a processor raises an illegal instruction.
  template <int Tile>
  static FA_INLINE index_t rows() {
    const index_t of_short = rows_of_short_tiles();
    if (of_short == 0) std::abort();
    return Tile < kShortTiles ? of_short : kTileRows;
  }

  // Rows that a short tile does not have are zeros, as products with several at a time read them.
  template <int Tile>
  FA_INLINE void clear_from(index_t row) {
    static_cast<void>(rows<Tile>());
    for (index_t r = row; r < kTileRows; ++r) std::memset(tiles_[Tile] + r * kTileBytes, 0, kTileBytes);
  }

  alignas(64) char tiles_[kTiles][kTileRows * kTileBytes];
};
#endif

template <class TilesT>
struct RowTiles : TilesT {
  static constexpr bool kOfBlocks = false, kOfRows = true;
};

template <class Target>
concept Tiled = Target::kTiled;

// A block of C in memory; the next one lies beside it.
struct TileBlock {
  float* c;
  index_t stride;

  template <int Tile>
  FA_INLINE float* tile() const {
    return c + (Tile / 2 * stride + Tile % 2) * kTileRows;
  }
  // Asks for rows 8 n .. 8 n + 7 of the next block. What is below it belongs to the next strip, and is asked for as
  // well.
  FA_INLINE void ask_for_next(index_t n) const {
    constexpr index_t kRowsOfPart = kTileBlock / 4;
    const float* next = c + kTileBlock + n * kRowsOfPart * stride;
    for (index_t r = 0; r < kRowsOfPart; ++r, next += stride) FA_PREFETCH(next), FA_PREFETCH(next + kTileRows);
  }
};

// What becomes of the accumulators of the block before, tile by tile, right before a tile's first product for this one.
// Stored in a row they would wait for the last of their products, and new products for them (60 instead of 42 ns for 8
// products and 4 stores on a Xeon).
template <class Target, bool Accumulate, bool StoreLast, int Tile>
FA_INLINE void begin_tile(typename Target::Tiles& tiles, const TileBlock& last, const TileBlock& block) {
  constexpr index_t kSize = sizeof(float);
  if constexpr (StoreLast) tiles.template store<Tile>(last.tile<Tile>(), last.stride * kSize);
  if constexpr (Accumulate)
    tiles.template load<Tile>(block.tile<Tile>(), block.stride * kSize);
  else
    tiles.template zero<Tile>();
}

// Which parts of A and of B (Bf16Parts) meet. The products of small ones come first, and one of both stays in its
// tiles. Those are left out that are as small as what rounding to all parts would leave of a sum; of fp16 none where
// both are inputs and the sum a score, which is as exact as its products then are.
struct PartProduct {
  int a, b;
};
template <int Parts, bool All>
inline constexpr PartProduct kPartProducts[] = {{0, 0}};
template <>
inline constexpr PartProduct kPartProducts<2, true>[] = {{0, 1}, {1, 1}, {1, 0}, {0, 0}};
template <>
inline constexpr PartProduct kPartProducts<2, false>[] = {{0, 1}, {0, 0}, {1, 0}};
template <bool All>
inline constexpr PartProduct kPartProducts<3, All>[] = {{0, 2}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 0}};

// Elements from a part to the next.
struct PartStrides {
  index_t a, b;
};

// Products of 32 k for a block of C; `begin` makes a tile ready for its first one.
template <class Target, bool All, class Begin>
FA_INLINE void multiply_tiles(typename Target::Tiles& tiles, const typename Target::Elem* rows, index_t row_stride,
                              const typename Target::Elem* columns, PartStrides parts, const Begin& begin) {
  constexpr auto& products = kPartProducts<Target::kParts, All>;
  constexpr index_t kSize = sizeof(*rows), kB = kTileBlock * Target::Format::kStep;  // From a k-step to the next.
  const index_t a_bytes = row_stride * kSize;
  const auto multiply = [&](auto nth) {
    constexpr int n = nth, last = n > 0 ? n - 1 : 0;
    constexpr PartProduct part = products[n], before = products[last];
    constexpr bool first = n == 0, loads_a = first || part.a != before.a, loads_b = first || part.b != before.b;
    const auto *a = rows + part.a * parts.a, *b = columns + part.b * parts.b;
    if constexpr (loads_a) tiles.template load<4>(a, a_bytes);
    if constexpr (loads_b) tiles.template load<6>(b, kB * kSize);
    if constexpr (first) begin(std::integral_constant<int, 0>());
    tiles.template multiply_add<0, 4, 6>();
    if constexpr (loads_b) tiles.template load<7>(b + kB / 2, kB * kSize);
    if constexpr (first) begin(std::integral_constant<int, 1>());
    tiles.template multiply_add<1, 4, 7>();
    if constexpr (loads_a) tiles.template load<5>(a + kTileRows * row_stride, a_bytes);
    if constexpr (first) begin(std::integral_constant<int, 2>());
    tiles.template multiply_add<2, 5, 6>();
    if constexpr (first) begin(std::integral_constant<int, 3>());
    tiles.template multiply_add<3, 5, 7>();
  };
  each_part(multiply, std::make_integer_sequence<int, int(std::size(products))>());
}

// A block's sums on their way to C, where numbers have three parts: these join C by vectors, as many k at a time as
// vectors sum by themselves (gemm.h). Each product of parts that joined C in its tile would round it, six times as
// often as products of bf16 do. Sums end where they do wherever the product begins, as there.
struct TileSums {
  alignas(kTileBytes) float sums[kTileBlock * kTileBlock];

  FA_INLINE TileBlock block() { return {sums, kTileBlock}; }
  template <class Simd>
  FA_INLINE void join(const TileBlock& to) const {
    fence_tiles();
    const float* from = sums;
    float* c = to.c;
    for (index_t r = 0; r < kTileBlock; ++r, from += kTileBlock, c += to.stride)
      for (index_t n = 0; n < kTileBlock; n += Simd::W) Simd::store(c + n, Simd::load(c + n) + Simd::load(from + n));
  }
};

// The micro-kernel's interface, in tiles; rows of A have k contiguous, and all extents are multiples of 32, none of
// them 0. Rows of A and the depth of B hold all parts of numbers; k counts numbers.
template <class Target, bool Accumulate, bool FarC = false>
  requires Tiled<Target>
void multiply_strip(const StripA<typename Target::Elem>& a, const Panels<Target>& b, index_t k_begin, index_t k_end,
                    index_t first, index_t last, float* c, index_t c_stride, bool = false) {
  static_assert(Target::kRows == kTileBlock && Target::kPanel == kTileBlock);
  constexpr index_t kParts = Target::kParts, kSum = kScalarsPerSum;
  constexpr bool kApart = Accumulate && kParts > 2;
  const PartStrides parts{a.row_stride / kParts, b.depth / kParts * kTileBlock};
  typename Target::Tiles tiles;
  [[maybe_unused]] TileSums apart;
  fence_tiles();
  TileBlock block{c, c_stride}, before{};
  const auto to = [&] {  // Where the sums of the block before go from their tiles.
    if constexpr (kApart) return apart.block();
    return before;
  };
  const auto multiply = [&](index_t panel, index_t begin, index_t end, auto store_last) {
    const auto *row = a.data + (begin - k_begin), *column = b.panel(panel) + begin * kTileBlock;
    multiply_tiles<Target, !Accumulate>(tiles, row, a.row_stride, column, parts, [&](auto tile) {
      begin_tile<Target, Accumulate && !kApart, decltype(store_last)::value, decltype(tile)::value>(tiles, to(), block);
    });
    if constexpr (kApart && decltype(store_last)::value) apart.join<typename Target::Simd>(before);
    for (index_t k = begin + kTileDepth; k < end; k += kTileDepth) {
      row += kTileDepth, column += kTileDepth * kTileBlock;
      if constexpr (FarC) block.ask_for_next((k - begin) / kTileDepth - 1);
      multiply_tiles<Target, !Accumulate>(tiles, row, a.row_stride, column, parts, [](auto) {});
    }
    before = block;
  };
  for (index_t panel = first / kTileBlock; panel < last / kTileBlock; ++panel, block.c += kTileBlock)
    for (index_t begin = k_begin, end; begin < k_end; begin = end) {
      end = kApart ? min_of(k_end, (begin / kSum + 1) * kSum) : k_end;
      before.c ? multiply(panel, begin, end, std::true_type()) : multiply(panel, begin, end, std::false_type());
    }
  const TileBlock last_sums = to();
  const index_t bytes = last_sums.stride * index_t(sizeof(float));
  each_part([&](auto tile) { tiles.template store<decltype(tile)::value>(last_sums.template tile<tile>(), bytes); },
            std::make_integer_sequence<int, 4>());
  if constexpr (kApart) apart.join<typename Target::Simd>(before);
  fence_tiles();
}

}  // namespace flash_attn::cpu
