// What the translation units of one variant share.
#pragma once
#include "../core/kernels.h"
#include "vec.h"

namespace steppe::STEPPE_VARIANT {

void add_int_tiles(Kernels& k);
void add_tile_products(Kernels& k);  // of variants that have tile registers
void add_float_tiles(Kernels& k);
void add_row_kernels(Kernels& k);
void add_weights(Kernels& k);
void add_attention(Kernels& k);
void add_cache(Kernels& k);

// Asks for the bytes [from, to) of a column block that comes next; `next` may be null.
inline __attribute__((always_inline)) void fetch(const uint8_t* next, size_t from, size_t to) {
  if (!next) return;
  for (size_t at = from; at < to; at += 64) __builtin_prefetch(next + at, 0, 2);
}

// Epilogue of a tile: (acc + bias) + add. The same two additions whatever the tile's shape.
template <int R>
inline __attribute__((always_inline)) void store_tile(const V::F (&acc)[R], int half, float* out,
                                                      size_t out_stride, const float* bias,
                                                      const float* add, size_t add_stride,
                                                      int columns) {
  const int at = half * V::W;
  const int n = columns - at < V::W ? columns - at : V::W;
  STEPPE_UNROLL
  for (int r = 0; r < R; r++) {
    V::F x = acc[r];
    if (bias) x = V::add(x, V::loadf(bias + at, n));
    if (add) x = V::add(x, V::loadf(add + size_t(r) * add_stride + at, n));
    if (n == V::W) V::store(out + size_t(r) * out_stride + at, x);
    else V::store(out + size_t(r) * out_stride + at, x, n);
  }
}

// The second half of that, for rows that were computed into a scratch of 16 columns.
inline void finish_rows(const float* scratch, int rows, float* out, size_t out_stride,
                        const float* add, size_t add_stride, int columns) {
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++) {
      float x = scratch[r * kColumns + c];
      if (add) x = x + add[size_t(r) * add_stride + size_t(c)];
      out[size_t(r) * out_stride + size_t(c)] = x;
    }
  }
}

}  // namespace steppe::STEPPE_VARIANT
