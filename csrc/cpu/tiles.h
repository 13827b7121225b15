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

// The micro-kernel's interface, in tiles; rows of A have k contiguous, and all extents are multiples of 32.
template <class Target, bool Accumulate>
  requires Tiled<Target>
void multiply_strip(const StripA<typename Target::Elem>& a, const Panels<Target>& b, index_t k_begin, index_t k_end,
                    index_t first, index_t last, float* c, index_t c_stride) {
  static_assert(Target::kRows == kTileBlock && Target::kPanel == kTileBlock);
  constexpr index_t kB = kTileBlock * Target::Format::kStep;  // From a k-step to the next in a panel.
  const index_t a_bytes = a.row_stride * index_t(sizeof(*a.data)), c_bytes = c_stride * index_t(sizeof(*c));
  constexpr index_t b_bytes = kB * index_t(sizeof(*a.data));
  typename Target::Tiles tiles;
  // Tile loads read what vectors and scalars wrote, which the compiler is to leave where it was.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  for (index_t panel = first / kTileBlock; panel < last / kTileBlock; ++panel) {
    float* const upper = c + b.begin(panel) - first;
    float* const lower = upper + kTileRows * c_stride;
    if constexpr (Accumulate) {
      tiles.template load<0>(upper, c_bytes);
      tiles.template load<1>(upper + kTileRows, c_bytes);
      tiles.template load<2>(lower, c_bytes);
      tiles.template load<3>(lower + kTileRows, c_bytes);
    } else {
      tiles.template zero<0>();
      tiles.template zero<1>();
      tiles.template zero<2>();
      tiles.template zero<3>();
    }
    const auto* column = b.panel(panel) + k_begin * kTileBlock;
    const auto* row = a.data;
    for (index_t k = k_begin; k < k_end; k += kTileDepth, row += kTileDepth, column += kTileDepth * kTileBlock) {
      tiles.template load<4>(row, a_bytes);
      tiles.template load<6>(column, b_bytes);
      tiles.template multiply_add<0>();
      tiles.template load<7>(column + kB / 2, b_bytes);
      tiles.template multiply_add<1>();
      tiles.template load<5>(row + kTileRows * a.row_stride, a_bytes);
      tiles.template multiply_add<2>();
      tiles.template multiply_add<3>();
    }
    tiles.template store<0>(upper, c_bytes);
    tiles.template store<1>(upper + kTileRows, c_bytes);
    tiles.template store<2>(lower, c_bytes);
    tiles.template store<3>(lower + kTileRows, c_bytes);
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

}  // namespace flash_attn::cpu
