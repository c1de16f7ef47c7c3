// The tile registers of AMX: what shape each has. A thread sets them before its first tile and lets go of
// them after its last one, so that nothing else pays for carrying them around.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace steppe::STEPPE_VARIANT {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  constexpr void set(int first, int end, int row_count, int bytes) {
    for (int i = first; i < end; i++) {
      row_bytes[i] = uint16_t(bytes);
      rows[i] = uint8_t(row_count);
    }
  }
};

// The shapes are constants: g++ 12 sees its load of them as one of 8 bytes, and could leave out what
// writes the rest.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Between stores and the tile loads that read them: for g++ 12 a tile load touches no memory.
inline __attribute__((always_inline)) void written() { __asm__ volatile("" ::: "memory"); }

}  // namespace steppe::STEPPE_VARIANT
