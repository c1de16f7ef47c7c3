// The products of attention in tiles of AMX: 16 rows of queries or weights at a time, which with few
// rows is still faster than vectors. What lies in a page as `pack` values of 16 keys (or dimensions)
// one row after another is just what the second operand of a tile product is.
//
// A row of a tile product depends on no other row. Its sums are another order than the vectors' (and
// exact for int8), so this is a variant of its own.
#pragma once
#include "attention_bf16.h"
#include "attention_int8.h"
#include "tiles.h"

namespace steppe::STEPPE_VARIANT {

// All of 16 rows of 64 bytes.
inline constexpr TileShapes kAttentionTiles = [] {
  TileShapes shapes;
  shapes.set(0, 8, 16, 64);
  return shapes;
}();

// Tiles 0 to 3 are sums, 4 is of the rows, 5 to 7 of the page in turn.
struct Bf16Tiles : Bf16 {
  static constexpr int kRows = 16;
  static bool takes(int dim) { return dim % 32 == 0; }

  // Four products of the tile of rows with neighbouring columns.
  static inline __attribute__((always_inline)) void step(const uint8_t* rows, size_t row_stride,
                                                         const uint8_t* page, size_t page_stride) {
    _tile_loadd(4, rows, long(row_stride));
    _tile_loadd(5, page, long(page_stride));
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, page + 64, long(page_stride));
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, page + 128, long(page_stride));
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, page + 192, long(page_stride));
    _tile_dpbf16ps(3, 4, 5);
  }
  static inline __attribute__((always_inline)) void begin() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static void scores(int, const KeySpan& span, const Rows& rows) {
    for (int half = 0; half < 2; half++) {
      if (span.to(half) <= span.from(half)) continue;
      float* out = rows.scores + half * 64;
      begin();
      for (int d = 0; d < rows.dim; d += 32)
        step(rows.queries + d * 2, rows.query_stride, span.page[half] + d * 128, 256);
      constexpr long stride = kBlockKeys * sizeof(float);
      _tile_stored(0, out, stride);
      _tile_stored(1, out + 16, stride);
      _tile_stored(2, out + 32, stride);
      _tile_stored(3, out + 48, stride);
    }
  }

  // Weights come in steps of 32 keys, of which those outside the span's vectors were not written.
  static void pad(int count, const KeySpan& span, const Rows& rows) {
    const int first = span.low / 16 * 16, end = (span.high + 15) / 16 * 16;
    for (int r = 0; r < count; r++) {
      uint8_t* w = rows.weights + size_t(r) * kWeightBytes;
      if (first % 32) __builtin_memset(w + (first - 16) * 2, 0, 32);
      if (end % 32) __builtin_memset(w + end * 2, 0, 32);
    }
  }

  static void sums(int count, const KeySpan& span, const Rows& rows, const float*) {
    pad(count, span, rows);
    const int dims = rows.layout->dims;
    const size_t step_bytes = size_t(dims) * 4;
    alignas(64) uint8_t rest[16 * 256];
    for (int column = 0; column < dims; column += 64) {
      const int columns = dims - column < 64 ? 2 : 4;  // dims is a multiple of 32
      begin();
      for (int half = 0; half < 2; half++) {
        const int to = span.to(half);
        if (to <= span.from(half)) continue;
        const uint8_t* values = span.page[half] + rows.layout->values + size_t(column) * 4;
        for (int key = span.from(half) / 32 * 32; key < to; key += 32) {
          const uint8_t* at = values + size_t(key / 2) * step_bytes;
          const uint8_t* w = rows.weights + (half * 64 + key) * 2;
          if (key + 32 <= to && columns == 4) {
            step(w, kWeightBytes, at, step_bytes);
            continue;
          }
          // What lies past the last key may be anything, and past the last column is no tile's.
          const int keys = to - key < 32 ? to - key : 32;
          for (int j = 0; j < 16; j++) {
            const __m512i mask = _mm512_set1_epi32(2 * j + 1 < keys ? -1 : 2 * j < keys ? 0xffff : 0);
            for (int c = 0; c < 4; c++) {
              __m512i x = _mm512_setzero_si512();
              if (c < columns && 2 * j < keys)
                x = _mm512_and_si512(_mm512_loadu_si512(at + size_t(j) * step_bytes + c * 64), mask);
              _mm512_store_si512(rest + j * 256 + c * 64, x);
            }
          }
          step(w, kWeightBytes, rest, 256);
        }
      }
      float* out = rows.sums + column;
      const long stride = long(rows.sums_stride * sizeof(float));
      _tile_stored(0, out, stride);
      _tile_stored(1, out + 16, stride);
      if (columns == 4) {
        _tile_stored(2, out + 32, stride);
        _tile_stored(3, out + 48, stride);
      }
    }
  }
};

struct Int8Tiles : Int8 {
  static constexpr int kRows = 16;
  static bool takes(int dim) { return dim % 64 == 0; }

  // (high << 7) + low of 16 sums of each row, times a vector.
  static void scores(int count, const KeySpan& span, const Rows& rows) {
    alignas(64) int32_t digits[2][16][32];
    const int bytes = plane(rows.dim);
    for (int half = 0; half < 2; half++) {
      if (span.to(half) <= span.from(half)) continue;
      const uint8_t* page = span.page[half];
      const uint8_t* scales = page + rows.layout->key_scales;
      for (int k = 0; k < 64; k += 32) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < rows.dim; d += 64) {
          const uint8_t* at = page + d * 64 + k * 4;
          _tile_loadd(4, rows.queries + d, long(rows.query_stride));
          _tile_loadd(5, at, 256);
          _tile_dpbsud(0, 4, 5);
          _tile_loadd(6, at + 64, 256);
          _tile_dpbsud(1, 4, 6);
          _tile_loadd(7, rows.queries + bytes + d, long(rows.query_stride));
          _tile_dpbsud(2, 7, 5);
          _tile_dpbsud(3, 7, 6);
        }
        _tile_stored(0, &digits[0][0][0], 128);
        _tile_stored(1, &digits[0][0][16], 128);
        _tile_stored(2, &digits[1][0][0], 128);
        _tile_stored(3, &digits[1][0][16], 128);
        for (int r = 0; r < count; r++) {
          int32_t minus[2];
          __builtin_memcpy(minus, rows.queries + size_t(r) * rows.query_stride + 2 * bytes, 8);
          const V::I start = V::iset(int32_t(uint32_t(minus[0]) << 7) + minus[1]);
          for (int v = 0; v < 32; v += 16) {
            const V::I sum = V::iadd(V::iadd(V::shl(V::load(&digits[0][r][v]), 7),
                                             V::load(&digits[1][r][v])), start);
            V::store(rows.scores + r * kBlockKeys + half * 64 + k + v,
                     V::mul(V::cvt(sum), V::as_float(V::load(scales + (k + v) * 4))));
          }
        }
      }
    }
  }

  static void sums(int count, const KeySpan& span, const Rows& rows, const float* factors) {
    const int first = span.low / 16 * 16, end = (span.high + 15) / 16 * 16;
    const int from = first / 64 * 64, to = (end + 63) / 64 * 64;
    for (int r = 0; r < count; r++)
      for (int d = 0; d < 2; d++) {
        uint8_t* w = rows.weights + size_t(r) * kWeightBytes + d * kBlockKeys;
        __builtin_memset(w + from, 0, size_t(first - from));
        __builtin_memset(w + end, 0, size_t(to - end));
      }
    alignas(64) int32_t digits[2][16][32];
    const size_t step_bytes = size_t(rows.layout->dims) * 4;
    for (int column = 0; column < rows.layout->dims; column += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int half = from / 64; half < to / 64; half++) {
        const uint8_t* at = span.page[half] + rows.layout->values + size_t(column) * 4;
        const uint8_t* w = rows.weights + half * 64;
        _tile_loadd(4, w, kWeightBytes);
        _tile_loadd(5, at, long(step_bytes));
        _tile_dpbssd(0, 4, 5);
        _tile_loadd(6, at + 64, long(step_bytes));
        _tile_dpbssd(1, 4, 6);
        _tile_loadd(7, w + kBlockKeys, kWeightBytes);
        _tile_dpbssd(2, 7, 5);
        _tile_dpbssd(3, 7, 6);
      }
      _tile_stored(0, &digits[0][0][0], 128);
      _tile_stored(1, &digits[0][0][16], 128);
      _tile_stored(2, &digits[1][0][0], 128);
      _tile_stored(3, &digits[1][0][16], 128);
      for (int r = 0; r < count; r++)
        for (int v = 0; v < 32; v += 16) {
          const V::I sum =
              V::iadd(V::shl(V::load(&digits[0][r][v]), 7), V::load(&digits[1][r][v]));
          V::store(rows.sums + size_t(r) * rows.sums_stride + column + v,
                   V::mul(V::cvt(sum), V::set(factors[r])));
        }
    }
  }
};

}  // namespace steppe::STEPPE_VARIANT
