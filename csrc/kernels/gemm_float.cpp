// bf16 x bf16 with float sums (pairs of k), and float x float. One accumulator per output, k rising.
#include "../core/kernels.h"
#include "variant.h"
#include "vec.h"

namespace steppe::STEPPE_VARIANT {
namespace {

using I = V::I;
using F = V::F;

template <Format f, int R>
void rows_of(const uint8_t* w, const uint8_t* next, int supers, const uint8_t* panel, int r0,
             float* out, size_t out_stride, const float* bias, const float* add, size_t add_stride,
             int columns) {
  constexpr int steps = f == Format::BF16 ? 32 : 64;  // in a super block
  for (int half = 0; half * V::W < columns; half++) {
    F acc[R];
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) acc[r] = V::zero();
    const uint8_t* p = panel + r0 * 4;
    const uint8_t* x = w + half * V::W * 4;
    for (int i = 0; i < supers * steps; i++, p += 4 * kPanelRows, x += 64) {
      const I weight = V::load(x);
      if (half == 0) fetch(next, size_t(i) * 64, size_t(i) * 64 + 64);
      STEPPE_UNROLL
      for (int r = 0; r < R; r++) {
        const I a = V::broadcast(p + r * 4);
        if constexpr (f == Format::BF16) acc[r] = V::dot_bf16(acc[r], weight, a);
        else acc[r] = V::fma(V::as_float(weight), V::as_float(a), acc[r]);
      }
    }
    store_tile<R>(acc, half, out, out_stride, bias, add, add_stride, columns);
  }
}

template <Format f>
void tile_ahead(const uint8_t* w, const uint8_t* next, int supers, const uint8_t* panel, int rows,
                float* out, size_t out_stride, const float* bias, const float* add,
                size_t add_stride, int columns) {
  for (int r = 0; r < rows; next = nullptr) {
    const int left = rows - r;
    float* o = out + size_t(r) * out_stride;
    const float* a = add ? add + size_t(r) * add_stride : nullptr;
    if (left >= 8) {
      rows_of<f, 8>(w, next, supers, panel, r, o, out_stride, bias, a, add_stride, columns);
      r += 8;
    } else if (left >= 4) {
      rows_of<f, 4>(w, next, supers, panel, r, o, out_stride, bias, a, add_stride, columns);
      r += 4;
    } else if (left >= 2) {
      rows_of<f, 2>(w, next, supers, panel, r, o, out_stride, bias, a, add_stride, columns);
      r += 2;
    } else {
      rows_of<f, 1>(w, next, supers, panel, r, o, out_stride, bias, a, add_stride, columns);
      r += 1;
    }
  }
}

template <Format f>
void tile(const uint8_t* w, int supers, const uint8_t* panel, int rows, float* out,
          size_t out_stride, const float* bias, const float* add, size_t add_stride, int columns) {
  tile_ahead<f>(w, nullptr, supers, panel, rows, out, out_stride, bias, add, add_stride, columns);
}

template <Format f>
void add_format(Kernels& k) {
  k.tile[int(f)] = tile<f>;
  k.tile_ahead[int(f)] = tile_ahead<f>;
}

}  // namespace

void add_float_tiles(Kernels& k) {
  add_format<Format::BF16>(k);
  add_format<Format::F32>(k);
}

}  // namespace steppe::STEPPE_VARIANT
