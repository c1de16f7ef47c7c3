// Scores and sums over keys and values kept in int8. Queries and weights are integers too, of two
// digits each, so that what int8 costs in accuracy is the rounding of keys and values alone: a query
// has 15 bits under one scale for each row, weights have 14 under one for each row and block.
#pragma once
#include "attention_bf16.h"

namespace steppe::STEPPE_VARIANT {

struct Int8 {
  static constexpr KvType kType = KvType::INT8;
  static constexpr int kRows = V::W == 16 ? 6 : 3;
  static constexpr int kVectors = V::W == 8 ? 1 : 2;  // each with two sums
  static constexpr float kLeast = 1e-30f;              // rows below it are zero

  static int plane(int dim) { return (dim + 3) / 4 * 4; }  // bytes of one digit of a query
  static size_t query_bytes(int dim) { return round_up(size_t(2 * plane(dim) + 8), 64); }

  // The largest of magnitudes, compared as integers: a NaN or an infinity is the largest of all, and
  // makes the scale, and with it all that follows, not finite.
  static float largest(V::I top) {
    const int32_t bits = V::hmax(top);
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }

  // A query is scale * (128 * high + low), both digits signed. After them stand minus 128 times
  // their sums, since keys are stored with 128 added.
  static float pack_query(const float* q, int dim, uint8_t* out) {
    V::I top = V::izero();
    for (int i = 0; i < dim; i += V::W)
      top = V::imax(top, V::as_int(V::abs(V::loadf(q + i, dim - i < V::W ? dim - i : V::W))));
    const float most = largest(top);
    const V::F inverse = V::set(most >= kLeast ? 16256.0f / most : 0.0f);
    const V::F limit = V::set(16256.0f);
    const int bytes = plane(dim);
    V::I sums[2] = {V::izero(), V::izero()};
    for (int i = 0; i < dim; i += V::W) {
      const int n = dim - i < V::W ? dim - i : V::W;
      const V::F scaled = V::mul(V::loadf(q + i, n), inverse);
      const V::F x = V::round(V::min(V::max(scaled, V::sub(V::zero(), limit)), limit));
      const V::F high = V::round(V::mul(x, V::set(1.0f / 128.0f)));
      const V::I digits[2] = {V::cvt(high), V::cvt(V::fma(high, V::set(-128.0f), x))};
      for (int d = 0; d < 2; d++) {
        int8_t t[V::W];
        V::store_i8(t, digits[d]);
        __builtin_memcpy(out + d * bytes + i, t, size_t(bytes - i < V::W ? bytes - i : V::W));
        sums[d] = V::iadd(sums[d], digits[d]);
      }
    }
    for (int d = 0; d < 2; d++) {
      const int32_t minus = -128 * V::hsum(sums[d]);
      __builtin_memcpy(out + 2 * bytes + 4 * d, &minus, 4);
    }
    return most < kLeast ? 0.0f : most * (1.0f / 16256.0f);
  }

  template <int R, int NV>
  static inline __attribute__((always_inline)) void keys(const uint8_t* page, int first_vector,
                                                         const Rows& rows, float* out) {
    const int bytes = plane(rows.dim);
    V::I acc[R][2][NV];
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      const uint8_t* q = rows.queries + size_t(r) * rows.query_stride;
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) {
        acc[r][0][v] = V::broadcast(q + 2 * bytes);
        acc[r][1][v] = V::broadcast(q + 2 * bytes + 4);
      }
    }
    const bool fetching = kStrides && first_vector == 0;
    for (int i = 0; i < bytes; i += 4) {
      if (fetching) fetch_step(page + i * 64, 256);
      V::I k[NV];
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) k[v] = V::load(page + i * 64 + (first_vector + v) * V::W * 4);
      STEPPE_UNROLL
      for (int r = 0; r < R; r++) {
        const uint8_t* q = rows.queries + size_t(r) * rows.query_stride + i;
        const V::I high = V::broadcast(q), low = V::broadcast(q + bytes);
        STEPPE_UNROLL
        for (int v = 0; v < NV; v++) {
          acc[r][0][v] = V::dp<false>(acc[r][0][v], k[v], high);
          acc[r][1][v] = V::dp<false>(acc[r][1][v], k[v], low);
        }
      }
    }
    const uint8_t* scales = page + rows.layout->key_scales;
    STEPPE_UNROLL
    for (int v = 0; v < NV; v++) {
      const V::F scale = V::as_float(V::load(scales + (first_vector + v) * V::W * 4));
      STEPPE_UNROLL
      for (int r = 0; r < R; r++) {
        const V::I sum = V::iadd(V::shl(acc[r][0][v], 7), acc[r][1][v]);
        V::store(out + r * kBlockKeys + (first_vector + v) * V::W, V::mul(V::cvt(sum), scale));
      }
    }
  }

  // The weight of a key takes its value's scale, and is then scale * (128 * high + low).
  static float weigh(const Rows& rows, int r, const KeySpan& span, int first, int end) {
    float* p = rows.scores + r * kBlockKeys;
    V::I top = V::izero();
    for (int i = first; i < end; i += V::W) {
      const uint8_t* scales = span.page[i / 64] + rows.layout->value_scales + size_t(i % 64) * 4;
      // What is not seen weighs nothing, whatever scale another sequence left there.
      const V::F x = V::loadf(p + i);
      const V::F w = V::zero_below(x, V::set(1e-38f), V::mul(x, V::as_float(V::load(scales))));
      V::store(p + i, w);
      top = V::imax(top, V::as_int(w));
    }
    const float most = largest(top);
    const V::F inverse = V::set(most >= kLeast ? 16383.0f / most : 0.0f);
    int8_t* to = reinterpret_cast<int8_t*>(rows.weights + size_t(r) * kWeightBytes);
    for (int i = first; i < end; i += V::W) {
      const V::I x = V::cvt(V::min(V::mul(V::loadf(p + i), inverse), V::set(16383.0f)));
      V::store_i8(to + i, V::shr(x, 7));
      V::store_i8(to + kBlockKeys + i, V::iand(x, V::iset(127)));
    }
    return most < kLeast ? 0.0f : most * (1.0f / 16383.0f);
  }

  template <int R, int NV>
  static inline __attribute__((always_inline)) void values(const KeySpan& span, const Rows& rows,
                                                           int column, const float* factors) {
    V::I acc[R][2][NV];
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) acc[r][0][v] = acc[r][1][v] = V::izero();
    }
    const size_t step_bytes = size_t(rows.layout->dims) * 4;
    const bool fetching = kStrides && column == 0;
    for (int half = 0; half < 2; half++) {
      const int from = span.from(half), to = span.to(half);
      if (to <= from) continue;
      const uint8_t* data = span.page[half] + rows.layout->values + size_t(column) * 4;
      const uint8_t* p = rows.weights + half * 64;
      for (int j = from / 4; j < (to + 3) / 4; j++) {
        if (fetching) fetch_step(data + size_t(j) * step_bytes, step_bytes);
        V::I x[NV];
        STEPPE_UNROLL
        for (int v = 0; v < NV; v++) x[v] = V::load(data + size_t(j) * step_bytes + v * V::W * 4);
        STEPPE_UNROLL
        for (int r = 0; r < R; r++) {
          const uint8_t* w = p + size_t(r) * kWeightBytes + 4 * j;
          const V::I high = V::broadcast(w), low = V::broadcast(w + kBlockKeys);
          STEPPE_UNROLL
          for (int v = 0; v < NV; v++) {
            acc[r][0][v] = V::dp<true>(acc[r][0][v], high, x[v]);
            acc[r][1][v] = V::dp<true>(acc[r][1][v], low, x[v]);
          }
        }
      }
    }
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      const V::F factor = V::set(factors[r]);
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) {
        const V::I sum = V::iadd(V::shl(acc[r][0][v], 7), acc[r][1][v]);
        V::store(rows.sums + size_t(r) * rows.sums_stride + column + v * V::W,
                 V::mul(V::cvt(sum), factor));
      }
    }
  }
};

}  // namespace steppe::STEPPE_VARIANT
