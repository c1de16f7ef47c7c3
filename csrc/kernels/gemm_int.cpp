// Int8 activations times 2- to 8-bit weights.
//
// For a group of 32 (or 16) values of k the products are summed in integers, exactly; then, in one
// fixed order of groups, out = fma(sum, weight scale * activation scale, out) and, for formats with a
// minimum, out = fma(sum of the group's activations, minimum, out). These float operations share the
// dot products' pipe, so per group of 8 dot products each of them costs; see `rows.cpp` for why the
// activation scale is a float all the same.
#include "../core/kernels.h"
#include "gemm_formats.h"
#include "gemm_narrow.h"
#include "variant.h"
#include "vec.h"

namespace steppe::STEPPE_VARIANT {
namespace {

// One group for `R` rows, whose panel data start at `panel` (row offset already added).
template <Format f, int g, int R>
inline __attribute__((always_inline)) void group(const uint8_t* super, const uint8_t* unit, int u,
                                                 int half, const uint8_t* panel, int r0,
                                                 F (&acc)[R]) {
  constexpr Layout L = layout_of(f);
  constexpr int raise = unshifted(f) && g == 1 ? 4 : 0;
  constexpr int sixteens = by_sixteen(f) ? 2 : 1;
  constexpr int steps = 8 / sixteens;
  constexpr int batch = R < 4 ? R : 4;
  I w[8];
  unpack<f, g>(unit, half, w);
  const uint8_t* quants = panel + r0 * 32;
  const uint8_t* scales = panel + kPanelScales + r0 * 4;
  const uint8_t* sums = panel + kPanelSums + r0 * 4;
  const uint8_t* negatives = panel + kPanelNegatives + r0 * 4;
  STEPPE_UNROLL
  for (int s = 0; s < sixteens; s++) {
    F scale = scale_of<f>(super, unit, u, g, s, half);
    if constexpr (raise != 0) scale = V::mul(scale, V::set(0.0625f));
    F minimum = V::zero();
    if constexpr (has_min(f)) minimum = min_of<f>(super, unit, u, g, s, half);
    STEPPE_UNROLL
    for (int b = 0; b < R; b += batch) {
      I sum[batch];
      STEPPE_UNROLL
      for (int r = 0; r < batch; r++) {
        if constexpr (L.zero != 0) {
          I n = V::broadcast(negatives + s * 32 + (b + r) * 4);
          if constexpr (!by_sixteen(f)) n = V::iadd(n, V::broadcast(negatives + 32 + (b + r) * 4));
          sum[r] = V::shl(n, log2i(L.zero) + raise);
        } else {
          sum[r] = V::izero();
        }
      }
      STEPPE_UNROLL
      for (int j = s * steps; j < s * steps + steps; j++) {
        STEPPE_UNROLL
        for (int r = 0; r < batch; r++)
          sum[r] = V::template dp<is_small(f)>(sum[r], w[j],
                                               V::broadcast(quants + (b + r) * 32 + j * 4));
      }
      STEPPE_UNROLL
      for (int r = 0; r < batch; r++) {
        const F x = V::as_float(V::broadcast(scales + (b + r) * 4));
        acc[b + r] = V::fma(V::cvt(sum[r]), V::mul(scale, x), acc[b + r]);
        if constexpr (has_min(f)) {
          if constexpr (by_sixteen(f)) {
            const F n = V::mul(V::cvt(V::broadcast(negatives + s * 32 + (b + r) * 4)), x);
            acc[b + r] = V::fma(V::sub(V::zero(), n), minimum, acc[b + r]);
          } else {
            const F n = V::as_float(V::broadcast(sums + (b + r) * 4));
            acc[b + r] = V::fma(n, minimum, acc[b + r]);
          }
        }
      }
    }
  }
}

template <Format f, int R>
void rows_of(const uint8_t* w, const uint8_t* next, int supers, const uint8_t* panel, int r0,
             float* out, size_t out_stride, const float* bias, const float* add, size_t add_stride,
             int columns) {
  constexpr Layout L = layout_of(f);
  constexpr int units = L.block_k / 64;
  if constexpr (V::W == 8) {
    rows_of_both<f, R>(w, next, supers, panel, r0, out, out_stride, bias, add, add_stride, columns);
    return;
  }
  for (int half = 0; half * V::W < columns; half++) {
    F acc[R];
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) acc[r] = V::zero();
    const uint8_t* p = panel;
    const uint8_t* super = w;
    for (int i = 0; i < supers; i++, super += L.block_bytes) {
      for (int u = 0; u < units; u++, p += 2 * kPanelGroupBytes) {
        const uint8_t* unit = super + L.header + u * L.unit;
        const size_t at = size_t(i) * L.block_bytes + size_t(u) * (L.block_bytes / units);
        if (half == 0) fetch(next, at, at + L.block_bytes / units);
        group<f, 0, R>(super, unit, u, half, p, r0, acc);
        group<f, 1, R>(super, unit, u, half, p + kPanelGroupBytes, r0, acc);
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
    // A row's arithmetic is the same in each of these; the wider ones share the unpacked weights.
    if (V::kMaxRows >= 8 && left > 4) {
      // Rows of the panel past `left` are computed and dropped: rows_of stores into a scratch.
      if (left >= 8) {
        rows_of<f, 8>(w, next, supers, panel, r, o, out_stride, bias, a, add_stride, columns);
      } else {
        float scratch[8 * kColumns];
        rows_of<f, 8>(w, next, supers, panel, r, scratch, kColumns, bias, nullptr, 0, columns);
        finish_rows(scratch, left, o, out_stride, a, add_stride, columns);
      }
      r += 8;
    } else if (V::kMaxRows >= 4 && left >= 4) {
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
  if constexpr (V::kPairs && stream_rows<f> > 0)
    k.streams[int(f)] = {stream_rows<f>, stream_count<f>, streams<f>};
}

}  // namespace

void add_int_tiles(Kernels& k) {
  add_format<Format::Q4_0>(k);
  add_format<Format::Q4_1>(k);
  add_format<Format::IQ4_NL>(k);
  add_format<Format::Q5_0>(k);
  add_format<Format::Q5_1>(k);
  add_format<Format::Q8_0>(k);
  add_format<Format::Q4_K>(k);
  add_format<Format::Q5_K>(k);
  add_format<Format::Q6_K>(k);
  add_format<Format::IQ4_XS>(k);
  add_format<Format::Q2_K>(k);
  add_format<Format::Q3_K>(k);
}

}  // namespace steppe::STEPPE_VARIANT
