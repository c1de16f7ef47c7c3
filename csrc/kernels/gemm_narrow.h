// The products of gemm_int.cpp for 16 registers of 8 lanes: both halves of a column block at once, one
// register of weights of each at a time. An activation is read once for both, and what is live (sums of
// two halves of four rows, two registers of weights) fits the registers; the float results do not, and
// are read and written once per group.
//
// Where there is no instruction for dot products (kPairs), products are summed two by two in 16 bits for
// as long as they are sure to fit, and only then in 32. Weights that two products of would not fit are
// multiplied as signed bytes: magnitudes, by activations with the signs of the weights.
#pragma once
#include "gemm_formats.h"
#include "variant.h"

namespace steppe::STEPPE_VARIANT {

template <Format f>
constexpr bool by_signs = V::kPairs && !is_small(f);

// Adds what a group (or sixteen s of it) comes to: its integer sums, scaled, and its minima.
template <Format f, int g, int R>
inline __attribute__((always_inline)) void add_sums(const uint8_t* super, const uint8_t* unit, int u,
                                                    int s, const uint8_t* panel, int r0,
                                                    I (&sum)[2][R], F (&acc)[2][R]) {
  constexpr Layout L = layout_of(f);
  constexpr int raise = unshifted(f) && g == 1 ? 4 : 0;
  const uint8_t* scales = panel + kPanelScales + r0 * 4;
  const uint8_t* sums = panel + kPanelSums + r0 * 4;
  const uint8_t* negatives = panel + kPanelNegatives + r0 * 4;
  F scale[2], minimum[2];
  STEPPE_UNROLL
  for (int h = 0; h < 2; h++) {
    scale[h] = scale_of<f>(super, unit, u, g, s, h);
    if constexpr (raise != 0) scale[h] = V::mul(scale[h], V::set(0.0625f));
    if constexpr (has_min(f)) minimum[h] = min_of<f>(super, unit, u, g, s, h);
  }
  STEPPE_UNROLL
  for (int r = 0; r < R; r++) {
    const F x = V::as_float(V::broadcast(scales + r * 4));
    STEPPE_UNROLL
    for (int h = 0; h < 2; h++) {
      if constexpr (L.zero != 0 && !by_signs<f>) {
        I n = V::broadcast(negatives + s * 32 + r * 4);
        if constexpr (!by_sixteen(f)) n = V::iadd(n, V::broadcast(negatives + 32 + r * 4));
        sum[h][r] = V::iadd(sum[h][r], V::shl(n, log2i(L.zero) + raise));
      }
      acc[h][r] = V::fma(V::cvt(sum[h][r]), V::mul(scale[h], x), acc[h][r]);
      if constexpr (has_min(f)) {
        if constexpr (by_sixteen(f)) {
          const F n = V::mul(V::cvt(V::broadcast(negatives + s * 32 + r * 4)), x);
          acc[h][r] = V::fma(V::sub(V::zero(), n), minimum[h], acc[h][r]);
        } else {
          const F n = V::as_float(V::broadcast(sums + r * 4));
          acc[h][r] = V::fma(n, minimum[h], acc[h][r]);
        }
      }
    }
  }
}

// `T` is V: a name that depends on it is looked up only where it is used, and not every V has all.
template <Format f, int g, int R, class T = V>
inline __attribute__((always_inline)) void group_of_both(const uint8_t* super, const uint8_t* unit,
                                                         int u, const uint8_t* panel, int r0,
                                                         F (&acc)[2][R]) {
  constexpr int sixteens = by_sixteen(f) ? 2 : 1;
  constexpr int steps = 8 / sixteens;
  constexpr bool in_pairs = T::kPairs && is_small(f);
  constexpr int run = in_pairs && pairs_that_fit(f) < steps ? pairs_that_fit(f) : steps;
  const uint8_t* quants = panel + r0 * 32;
  STEPPE_UNROLL
  for (int s = 0; s < sixteens; s++) {
    I sum[2][R];
    STEPPE_UNROLL
    for (int i = 0; i < steps; i += run) {
      I two[2][R];
      STEPPE_UNROLL
      for (int j = i; j < i + run; j++) {
        const int at = s * steps + j;
        I w[2] = {unpack<f, g>(unit, 0, at), unpack<f, g>(unit, 1, at)};
        if constexpr (by_signs<f>) w[0] = T::around_zero(w[0]), w[1] = T::around_zero(w[1]);
        STEPPE_UNROLL
        for (int r = 0; r < R; r++) {
          const I a = V::broadcast(quants + r * 32 + at * 4);
          STEPPE_UNROLL
          for (int h = 0; h < 2; h++) {
            if constexpr (in_pairs) {
              const I x = T::pairs(w[h], a);
              two[h][r] = j == i ? x : T::add_pairs(two[h][r], x);
            } else if constexpr (by_signs<f>) {
              const I x = T::pairs(T::magnitude(w[h]), T::signed_by(a, w[h]));
              sum[h][r] = T::fold_pairs(j == 0 ? V::izero() : sum[h][r], x);
            } else {
              sum[h][r] = V::template dp<is_small(f)>(j == 0 ? V::izero() : sum[h][r], w[h], a);
            }
          }
        }
      }
      if constexpr (in_pairs) {
        STEPPE_UNROLL
        for (int r = 0; r < R; r++) {
          sum[0][r] = T::fold_pairs(i == 0 ? V::izero() : sum[0][r], two[0][r]);
          sum[1][r] = T::fold_pairs(i == 0 ? V::izero() : sum[1][r], two[1][r]);
        }
      }
    }
    add_sums<f, g, R>(super, unit, u, s, panel, r0, sum, acc);
  }
}

template <Format f, int R>
void rows_of_both(const uint8_t* w, const uint8_t* next, int supers, const uint8_t* panel, int r0,
                  float* out, size_t out_stride, const float* bias, const float* add,
                  size_t add_stride, int columns) {
  constexpr Layout L = layout_of(f);
  constexpr int units = L.block_k / 64;
  F acc[2][R];
  STEPPE_UNROLL
  for (int r = 0; r < R; r++) acc[0][r] = acc[1][r] = V::zero();
  const uint8_t* super = w;
  for (int i = 0; i < supers; i++, super += L.block_bytes) {
    for (int u = 0; u < units; u++, panel += 2 * kPanelGroupBytes) {
      const uint8_t* unit = super + L.header + u * L.unit;
      const size_t at = size_t(i) * L.block_bytes + size_t(u) * (L.block_bytes / units);
      fetch(next, at, at + L.block_bytes / units);
      group_of_both<f, 0, R>(super, unit, u, panel, r0, acc);
      group_of_both<f, 1, R>(super, unit, u, panel + kPanelGroupBytes, r0, acc);
    }
  }
  store_tile<R>(acc[0], 0, out, out_stride, bias, add, add_stride, columns);
  if (columns > V::W) store_tile<R>(acc[1], 1, out, out_stride, bias, add, add_stride, columns);
}

// Weights of 4 bits whose products are summed in 16 bits up to the end of a group.
template <Format f>
constexpr bool by_nibbles = V::kPairs && has_nibbles(f) && is_small(f) && pairs_that_fit(f) == 8;

// Both groups of a unit of such weights at once: what is read of a line is used up before the next line,
// so that lines are asked for at an even pace.
template <Format f, int R, class T = V>
inline __attribute__((always_inline)) void unit_of_both(const uint8_t* super, const uint8_t* unit,
                                                        int u, const uint8_t* panel,
                                                        F (&acc)[2][R]) {
  I low[2][R], high[2][R];
  STEPPE_UNROLL
  for (int j = 0; j < 8; j++) {
    STEPPE_UNROLL
    for (int h = 0; h < 2; h++) {
      const I w[2] = {unpack<f, 0>(unit, h, j), unpack<f, 1>(unit, h, j)};
      STEPPE_UNROLL
      for (int r = 0; r < R; r++) {
        const uint8_t* quants = panel + r * 32 + j * 4;
        const I x = T::pairs(w[0], V::broadcast(quants));
        const I y = T::pairs(w[1], V::broadcast(quants + kPanelGroupBytes));
        low[h][r] = j == 0 ? x : T::add_pairs(low[h][r], x);
        high[h][r] = j == 0 ? y : T::add_pairs(high[h][r], y);
      }
    }
  }
  STEPPE_UNROLL
  for (int h = 0; h < 2; h++) {
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      low[h][r] = T::fold_pairs(V::izero(), low[h][r]);
      high[h][r] = T::fold_pairs(V::izero(), high[h][r]);
    }
  }
  add_sums<f, 0, R>(super, unit, u, 0, panel, 0, low, acc);
  add_sums<f, 1, R>(super, unit, u, 0, panel + kPanelGroupBytes, 0, high, acc);
}

// R rows with N column blocks, unit by unit of each.
template <Format f, int R, int N>
void rows_of_streams(const ColumnBlock* blocks, int supers, const uint8_t* panel, size_t out_stride,
                     size_t add_stride) {
  constexpr Layout L = layout_of(f);
  constexpr int units = L.block_k / 64;
  F acc[N][2][R];
  STEPPE_UNROLL
  for (int b = 0; b < N; b++) {
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) acc[b][0][r] = acc[b][1][r] = V::zero();
  }
  for (int i = 0; i < supers; i++) {
    for (int u = 0; u < units; u++, panel += 2 * kPanelGroupBytes) {
      STEPPE_UNROLL
      for (int b = 0; b < N; b++) {
        const uint8_t* super = blocks[b].w + size_t(i) * L.block_bytes;
        const uint8_t* unit = super + L.header + u * L.unit;
        if constexpr (by_nibbles<f>) {
          unit_of_both<f, R>(super, unit, u, panel, acc[b]);
        } else {
          group_of_both<f, 0, R>(super, unit, u, panel, 0, acc[b]);
          group_of_both<f, 1, R>(super, unit, u, panel + kPanelGroupBytes, 0, acc[b]);
        }
      }
    }
  }
  STEPPE_UNROLL
  for (int b = 0; b < N; b++) {
    const ColumnBlock& to = blocks[b];
    store_tile<R>(acc[b][0], 0, to.out, out_stride, to.bias, to.add, add_stride, to.columns);
    if (to.columns > V::W)
      store_tile<R>(acc[b][1], 1, to.out, out_stride, to.bias, to.add, add_stride, to.columns);
  }
}

// Measured on a Zen 3. With more streams of bytes it is slower, and with more rows of nibbles; so are all
// formats that take more work to unpack, for which fetching ahead of one stream is better.
template <Format f>
constexpr int stream_count = f == Format::Q8_0 ? 2 : by_nibbles<f> ? 4 : 1;
template <Format f>
constexpr int stream_rows = f == Format::Q8_0 ? 2 : by_nibbles<f> ? 1 : 0;

template <Format f>
void streams(const ColumnBlock* blocks, int count, int supers, const uint8_t* panel, int rows,
             size_t out_stride, size_t add_stride) {
  auto some = [&]<int N>() {
    if (stream_rows<f> == 1 || rows == 1)
      rows_of_streams<f, 1, N>(blocks, supers, panel, out_stride, add_stride);
    else
      rows_of_streams<f, stream_rows<f>, N>(blocks, supers, panel, out_stride, add_stride);
    blocks += N;
    count -= N;
  };
  if constexpr (stream_count<f> == 4)
    if (count == 4) return some.template operator()<4>();
  while (count >= 2) some.template operator()<2>();
  if (count > 0) some.template operator()<1>();
}

}  // namespace steppe::STEPPE_VARIANT
