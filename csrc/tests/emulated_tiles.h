// The tiles of AMX and what its instructions do to them (emulated.h).
#pragma once
#include <initializer_list>

#include "emulated_registers.h"

namespace {
namespace emulated {

// Eight tiles of up to 16 rows of up to 64 bytes.
struct Configuration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
struct TileState {
  Configuration shapes{};
  uint8_t data[8][16][64];
  int rows(int t) const { return shapes.rows[t]; }
  int bytes(int t) const { return shapes.row_bytes[t]; }
};
thread_local TileState tiles;

STEPPE_INSTRUCTION void configure(const void* from) {
  std::memcpy(&tiles.shapes, from, sizeof tiles.shapes);
  bool fits = tiles.shapes.palette == 1 && tiles.shapes.start_row == 0;
  for (uint8_t zero : tiles.shapes.reserved) fits = fits && zero == 0;
  for (int t = 0; t < 16; t++) {
    const int rows = tiles.shapes.rows[t], bytes = tiles.shapes.row_bytes[t];
    fits = fits && rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0) && (t < 8 || rows == 0);
  }
  check(fits, "no such configuration of tiles");
  std::memset(tiles.data, 0, sizeof tiles.data);
}
STEPPE_INSTRUCTION void release() { tiles = TileState{}; }
inline void configured(int t) { check(tiles.rows(t) > 0, "a tile that is not configured"); }
STEPPE_INSTRUCTION void tile_load(int t, const void* from, long stride) {
  configured(t);
  std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
  for (int r = 0; r < tiles.rows(t); r++)
    std::memcpy(tiles.data[t][r], static_cast<const uint8_t*>(from) + r * stride,
                size_t(tiles.bytes(t)));
}
STEPPE_INSTRUCTION void tile_store(int t, void* to, long stride) {
  configured(t);
  for (int r = 0; r < tiles.rows(t); r++)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.data[t][r], size_t(tiles.bytes(t)));
}
STEPPE_INSTRUCTION void tile_clear(int t) {
  configured(t);
  std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
inline void check_shapes(int c, int a, int b) {
  for (int t : {a, b, c}) configured(t);
  check(c != a && c != b && a != b, "a product of tiles needs three different ones");
  check(tiles.rows(c) == tiles.rows(a) && tiles.bytes(c) == tiles.bytes(b) &&
            tiles.bytes(a) == 4 * tiles.rows(b) && tiles.bytes(b) % 4 == 0,
        "a product of tiles whose shapes do not go together");
}
// c[m][n] += the four products of bytes of a[m][k] and b[k][n], for every k.
template <class A, class B>
void tile_product(int c, int a, int b) {
  check_shapes(c, a, b);
  for (int m = 0; m < tiles.rows(c); m++)
    for (int k = 0; k < tiles.rows(b); k++)
      for (int n = 0; n < tiles.bytes(c) / 4; n++) {
        int32_t sum;
        A x[4];
        B y[4];
        std::memcpy(&sum, tiles.data[c][m] + 4 * n, 4);
        std::memcpy(x, tiles.data[a][m] + 4 * k, 4);
        std::memcpy(y, tiles.data[b][k] + 4 * n, 4);
        sum = products_of_bytes(sum, x, y);
        std::memcpy(tiles.data[c][m] + 4 * n, &sum, 4);
      }
}
STEPPE_INSTRUCTION void tile_dpbssd(int c, int a, int b) { tile_product<int8_t, int8_t>(c, a, b); }
STEPPE_INSTRUCTION void tile_dpbsud(int c, int a, int b) { tile_product<int8_t, uint8_t>(c, a, b); }
// The even products of a row are summed apart from the odd ones, and both sums are added in the end.
STEPPE_INSTRUCTION void tile_dpbf16(int c, int a, int b) {
  check_shapes(c, a, b);
  for (int m = 0; m < tiles.rows(c); m++)
    for (int n = 0; n < tiles.bytes(c) / 4; n++) {
      float parts[2] = {0.0f, 0.0f}, sum;
      for (int k = 0; k < tiles.rows(b); k++)
        for (int i = 0; i < 2; i++) {
          uint16_t x, y;
          std::memcpy(&x, tiles.data[a][m] + 4 * k + 2 * i, 2);
          std::memcpy(&y, tiles.data[b][k] + 4 * n + 2 * i, 2);
          parts[i] = flushed(std::fma(widened(x), widened(y), parts[i]));
        }
      std::memcpy(&sum, tiles.data[c][m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
      std::memcpy(tiles.data[c][m] + 4 * n, &sum, 4);
    }
}

}  // namespace emulated
}  // namespace
