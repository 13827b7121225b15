// AMX-BF16: tiles of 16 rows of 64 bytes, and the micro-kernel that works in them.
//
// A block of C is 32 x 32, four tiles: tile 2 r + c. Its operands are two tiles of A (4, 5) and two of B (6, 7), each
// 32 deep: a tile of A is 16 rows with k contiguous, a tile of B 16 pairs of k by 16 columns, which is how panels are
// packed already. A tile's products are summed by themselves before they join C, so there is no need for
// kStepsPerSum, and tiles that are zero change no bit of C.
#pragma once

#include <atomic>
#include <cstdlib>

#include "cpu/gemm.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace flash_attn::cpu {

// For targets whose micro-kernel works in vector registers.
struct NoTiles {
  struct Session {};
};

inline constexpr index_t kTileRows = 16, kTileDepth = 32;  // Numbers of a tile of A.
inline constexpr index_t kTileBytes = 64;                  // Of a row.
inline constexpr index_t kTileBlock = 2 * kTileRows;       // Rows and columns of a block of C.

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
// The layout that LDTILECFG reads (Intel SDM volume 2, LDTILECFG).
struct TileConfig {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_bytes[16];
  std::uint8_t rows[16];
};

// The compiler's intrinsics want literal tile numbers, and do not say what memory they read: hence the switches, and
// the fences in multiply_strip.
class AmxTiles {
 public:
  // The tile registers of a thread are set up while one exists.
  class Session {
   public:
    FA_INLINE Session() {
      alignas(64) static constexpr TileConfig config{
          1,
          0,
          {},
          {kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes},
          {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows}};
      _tile_loadconfig(&config);
    }
    FA_INLINE ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <int Tile>
  FA_INLINE void zero() {
    if constexpr (Tile == 0) _tile_zero(0);
    if constexpr (Tile == 1) _tile_zero(1);
    if constexpr (Tile == 2) _tile_zero(2);
    if constexpr (Tile == 3) _tile_zero(3);
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
  }
  // C of row r, column c of the block += its A times its B.
  template <int Tile>
  FA_INLINE void multiply_add() {
    if constexpr (Tile == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (Tile == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (Tile == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (Tile == 3) _tile_dpbf16ps(3, 5, 7);
  }
};
#endif

// The same registers and instructions in plain code, for machines that lack them: same loads, stores and order of sums.
// Subnormal numbers are kept, where the instruction takes them as zero.
class EmulatedTiles {
 public:
  class Session {
   public:
    FA_INLINE Session() { configured() = true; }
    FA_INLINE ~Session() { configured() = false; }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <int Tile>
  FA_INLINE void zero() {
    check();
    std::memset(tiles_[Tile], 0, sizeof(tiles_[Tile]));
  }
  template <int Tile>
  FA_INLINE void load(const void* from, index_t stride_bytes) {
    check();
    for (index_t r = 0; r < kTileRows; ++r)
      std::memcpy(tiles_[Tile] + r * kTileBytes, static_cast<const char*>(from) + r * stride_bytes, kTileBytes);
  }
  template <int Tile>
  FA_INLINE void store(void* to, index_t stride_bytes) const {
    check();
    for (index_t r = 0; r < kTileRows; ++r)
      std::memcpy(static_cast<char*>(to) + r * stride_bytes, tiles_[Tile] + r * kTileBytes, kTileBytes);
  }
  // TDPBF16PS: even and odd k are summed apart, from zero, and then join C (Intel SDM volume 2).
  template <int Tile>
  FA_INLINE void multiply_add() {
    check();
    constexpr index_t kPairs = kTileDepth / 2;
    BFloat16 a[kTileRows][kPairs][2], b[kPairs][kTileRows][2];
    float c[kTileRows][kTileRows];
    std::memcpy(a, tiles_[4 + Tile / 2], sizeof(a));
    std::memcpy(b, tiles_[6 + Tile % 2], sizeof(b));
    std::memcpy(c, tiles_[Tile], sizeof(c));
    for (index_t r = 0; r < kTileRows; ++r) {
      float even[kTileRows] = {}, odd[kTileRows] = {};
      for (index_t k = 0; k < kPairs; ++k)
        for (index_t n = 0; n < kTileRows; ++n) {
          even[n] += to_float(a[r][k][0]) * to_float(b[k][n][0]);
          odd[n] += to_float(a[r][k][1]) * to_float(b[k][n][1]);
        }
      for (index_t n = 0; n < kTileRows; ++n) c[r][n] += even[n] + odd[n];
    }
    std::memcpy(tiles_[Tile], c, sizeof(c));
  }

 private:
  static FA_INLINE bool& configured() {
    static thread_local bool yes = false;
    return yes;
  }
  // A processor raises an illegal instruction.
  static FA_INLINE void check() {
    if (!configured()) std::abort();
  }

  alignas(64) char tiles_[8][kTileRows * kTileBytes];
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
  const index_t bytes = block.stride * index_t(sizeof(float));
  if constexpr (StoreLast) tiles.template store<Tile>(last.tile<Tile>(), bytes);
  if constexpr (Accumulate)
    tiles.template load<Tile>(block.tile<Tile>(), bytes);
  else
    tiles.template zero<Tile>();
}

// Products of 32 k for a block of C; `begin` makes a tile ready for its first one.
template <class Target, class Begin>
FA_INLINE void multiply_tiles(typename Target::Tiles& tiles, const typename Target::Elem* rows, index_t row_stride,
                              const typename Target::Elem* columns, const Begin& begin) {
  constexpr index_t kSize = sizeof(*rows), kB = kTileBlock * Target::Format::kStep;  // From a k-step to the next.
  const index_t a_bytes = row_stride * kSize;
  tiles.template load<4>(rows, a_bytes);
  tiles.template load<6>(columns, kB * kSize);
  begin(std::integral_constant<int, 0>());
  tiles.template multiply_add<0>();
  tiles.template load<7>(columns + kB / 2, kB * kSize);
  begin(std::integral_constant<int, 1>());
  tiles.template multiply_add<1>();
  tiles.template load<5>(rows + kTileRows * row_stride, a_bytes);
  begin(std::integral_constant<int, 2>());
  tiles.template multiply_add<2>();
  begin(std::integral_constant<int, 3>());
  tiles.template multiply_add<3>();
}

// The micro-kernel's interface, in tiles; rows of A have k contiguous, and all extents are multiples of 32, none of
// them 0.
template <class Target, bool Accumulate, bool FarC = false>
  requires Tiled<Target>
void multiply_strip(const StripA<typename Target::Elem>& a, const Panels<Target>& b, index_t k_begin, index_t k_end,
                    index_t first, index_t last, float* c, index_t c_stride, bool = false) {
  static_assert(Target::kRows == kTileBlock && Target::kPanel == kTileBlock);
  typename Target::Tiles tiles;
  // Tile loads read what vectors and scalars wrote, which the compiler is to leave where it was.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  TileBlock block{c, c_stride}, before{};
  const auto multiply = [&](index_t panel, auto store_last) {
    const auto *row = a.data, *column = b.panel(panel) + k_begin * kTileBlock;
    multiply_tiles<Target>(tiles, row, a.row_stride, column, [&](auto tile) {
      begin_tile<Target, Accumulate, decltype(store_last)::value, decltype(tile)::value>(tiles, before, block);
    });
    for (index_t k = k_begin + kTileDepth; k < k_end; k += kTileDepth) {
      row += kTileDepth, column += kTileDepth * kTileBlock;
      if constexpr (FarC) block.ask_for_next((k - k_begin) / kTileDepth - 1);
      multiply_tiles<Target>(tiles, row, a.row_stride, column, [](auto) {});
    }
    before = block;
    block.c += kTileBlock;
  };
  multiply(first / kTileBlock, std::false_type());
  for (index_t panel = first / kTileBlock + 1; panel < last / kTileBlock; ++panel) multiply(panel, std::true_type());
  const index_t bytes = c_stride * index_t(sizeof(float));
  each_part([&](auto tile) { tiles.template store<decltype(tile)::value>(before.template tile<tile>(), bytes); },
            std::make_integer_sequence<int, 4>());
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

}  // namespace flash_attn::cpu
