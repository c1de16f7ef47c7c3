// Scores and sums over keys and values kept in f16, multiplied as float32: no machine here has a dot
// product of halves that adds up in float32.
#pragma once
#include "attention_bf16.h"

namespace steppe::STEPPE_VARIANT {

struct F16 {
  static constexpr KvType kType = KvType::F16;
  static constexpr int kRows = V::W == 16 ? 6 : 4;
  static constexpr int kVectors = V::W == 8 ? 2 : 4;

  static size_t query_bytes(int dim) { return round_up(size_t(dim), 16) * 4; }

  static float pack_query(const float* q, int dim, uint8_t* out) {
    __builtin_memcpy(out, q, size_t(dim) * sizeof(float));
    return 1.0f;
  }

  template <int R, int NV>
  static inline __attribute__((always_inline)) void keys(const uint8_t* page, int first_vector,
                                                         const Rows& rows, float* out) {
    V::F acc[R][NV];
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) acc[r][v] = V::zero();
    }
    const bool fetching = kStrides && first_vector == 0;
    for (int i = 0; i < rows.dim; i++) {
      if (fetching) fetch_step(page + i * 128, 128);
      V::F k[NV];
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++)
        k[v] = V::half_to_float(
            reinterpret_cast<const uint16_t*>(page + i * 128 + (first_vector + v) * V::W * 2));
      STEPPE_UNROLL
      for (int r = 0; r < R; r++) {
        const V::F x = V::as_float(V::broadcast(rows.queries + size_t(r) * rows.query_stride + 4 * i));
        STEPPE_UNROLL
        for (int v = 0; v < NV; v++) acc[r][v] = V::fma(k[v], x, acc[r][v]);
      }
    }
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++)
        V::store(out + r * kBlockKeys + (first_vector + v) * V::W, acc[r][v]);
    }
  }

  static float weigh(const Rows& rows, int r, const KeySpan&, int first, int end) {
    __builtin_memcpy(rows.weights + size_t(r) * kWeightBytes + size_t(first) * 4,
                     rows.scores + r * kBlockKeys + first, size_t(end - first) * sizeof(float));
    return 1.0f;
  }

  template <int R, int NV>
  static inline __attribute__((always_inline)) void values(const KeySpan& span, const Rows& rows,
                                                           int column, const float*) {
    V::F acc[R][NV];
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) acc[r][v] = V::zero();
    }
    const size_t step_bytes = size_t(rows.layout->dims) * 2;
    const bool fetching = kStrides && column == 0;
    for (int half = 0; half < 2; half++) {
      const int from = span.from(half), to = span.to(half);
      if (to <= from) continue;
      const uint8_t* data = span.page[half] + rows.layout->values + size_t(column) * 2;
      const uint8_t* p = rows.weights + half * 256;
      for (int j = from; j < to; j++) {
        if (fetching) fetch_step(data + size_t(j) * step_bytes, step_bytes);
        V::F x[NV];
        STEPPE_UNROLL
        for (int v = 0; v < NV; v++)
          x[v] = V::half_to_float(reinterpret_cast<const uint16_t*>(
              data + size_t(j) * step_bytes + v * V::W * 2));
        STEPPE_UNROLL
        for (int r = 0; r < R; r++) {
          const V::F w = V::as_float(V::broadcast(p + size_t(r) * kWeightBytes + 4 * j));
          STEPPE_UNROLL
          for (int v = 0; v < NV; v++) acc[r][v] = V::fma(x[v], w, acc[r][v]);
        }
      }
    }
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++)
        V::store(rows.sums + size_t(r) * rows.sums_stride + column + v * V::W, acc[r][v]);
    }
  }
};

}  // namespace steppe::STEPPE_VARIANT
