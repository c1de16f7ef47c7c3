// Scores and sums over keys and values kept in bf16: two products a lane in one instruction.
#pragma once
#include "../core/kernels.h"
#include "vec.h"

namespace steppe::STEPPE_VARIANT {

// The part of a block of keys that some row of a group sees, [low, high), and where its pages lie.
// A page of which nothing is seen has no address.
struct KeySpan {
  const uint8_t* page[2];  // head blocks
  int low, high;
  int from(int half) const { return low > 64 * half ? low - 64 * half : 0; }
  int to(int half) const { return high - 64 * half < 64 ? high - 64 * half : 64; }
};

constexpr size_t kWeightBytes = kBlockKeys * sizeof(float);

// The rows of a group and where what is computed of them goes.
struct Rows {
  const KvLayout* layout;
  int dim;
  const uint8_t* queries;  // [rows][query_stride], as `pack_query` wrote them
  size_t query_stride;
  float* scores;           // [rows][kBlockKeys], of the present block
  uint8_t* weights;        // [rows][kWeightBytes], as `weigh` writes them
  float* sums;             // [rows][sums_stride]
  size_t sums_stride;
};

// Narrow registers take a block in several passes, each of them some bytes of every step: memory read
// in strides, which no processor foresees as well as it does a stream. So the first pass asks for the
// rest of each step that it takes. (Asking for steps ahead was slower.)
constexpr bool kStrides = V::W < 16;
inline __attribute__((always_inline)) void fetch_step(const uint8_t* p, size_t bytes) {
  for (size_t at = 64; at < bytes; at += 64) __builtin_prefetch(p + at);
}

struct Bf16 {
  static constexpr KvType kType = KvType::BF16;
  // With 32 registers, 6 rows of 4 vectors leave room for what is loaded.
  static constexpr int kRows = V::W == 16 ? 6 : 4;
  static constexpr int kVectors = V::W == 8 ? 2 : 4;

  static size_t query_bytes(int dim) { return round_up(size_t(dim), 16) * 2; }

  // Returns what scores of this row have to be multiplied by.
  static float pack_query(const float* q, int dim, uint8_t* out) {
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    for (int i = 0; i < dim; i += V::W) {
      uint16_t h[V::W];
      const int n = dim - i < V::W ? dim - i : V::W;
      V::store_bf16(h, V::loadf(q + i, n));  // zeros past n
      __builtin_memcpy(to + i, h, size_t(n + (n & 1)) * 2);
    }
    return 1.0f;
  }

  template <int R, int NV>
  static inline __attribute__((always_inline)) void keys(const uint8_t* page, int first_vector,
                                                         const Rows& rows, float* out) {
    const int steps = (rows.dim + 1) / 2;
    const bool fetching = kStrides && first_vector == 0;
    V::F acc[R][NV];
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) acc[r][v] = V::zero();
    }
    for (int i = 0; i < steps; i++) {
      V::I k[NV];
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++) k[v] = V::load(page + i * 256 + (first_vector + v) * V::W * 4);
      if (fetching) fetch_step(page + i * 256, 256);
      STEPPE_UNROLL
      for (int r = 0; r < R; r++) {
        const V::I x = V::broadcast(rows.queries + size_t(r) * rows.query_stride + 4 * i);
        STEPPE_UNROLL
        for (int v = 0; v < NV; v++) acc[r][v] = V::dot_bf16(acc[r][v], k[v], x);
      }
    }
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      STEPPE_UNROLL
      for (int v = 0; v < NV; v++)
        V::store(out + r * kBlockKeys + (first_vector + v) * V::W, acc[r][v]);
    }
  }

  // Rounds the weights [first, end) of row r, which stand where its scores did, to what `values`
  // multiplies. Returns what the row's sums have to be multiplied by.
  static float weigh(const Rows& rows, int r, const KeySpan&, int first, int end) {
    const float* p = rows.scores + r * kBlockKeys;
    uint16_t* to = reinterpret_cast<uint16_t*>(rows.weights + size_t(r) * kWeightBytes);
    for (int i = first; i < end; i += V::W) V::store_bf16(to + i, V::loadf(p + i));
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
    const size_t step_bytes = size_t(rows.layout->dims) * 4;
    const bool fetching = kStrides && column == 0;
    for (int half = 0; half < 2; half++) {
      const int from = span.from(half), to = span.to(half);
      if (to <= from) continue;
      const uint8_t* data = span.page[half] + rows.layout->values + size_t(column) * 4;
      const uint8_t* p = rows.weights + half * 128;
      auto step = [&](int j, V::I mask) __attribute__((always_inline)) {
        V::I x[NV];
        STEPPE_UNROLL
        for (int v = 0; v < NV; v++)
          x[v] = V::iand(V::load(data + size_t(j) * step_bytes + v * V::W * 4), mask);
        if (fetching) fetch_step(data + size_t(j) * step_bytes, step_bytes);
        STEPPE_UNROLL
        for (int r = 0; r < R; r++) {
          const V::I w = V::broadcast(p + size_t(r) * kWeightBytes + 4 * j);
          STEPPE_UNROLL
          for (int v = 0; v < NV; v++) acc[r][v] = V::dot_bf16(acc[r][v], x[v], w);
        }
      };
      for (int j = from / 2; j < to / 2; j++) step(j, V::iset(-1));
      // Beside the last value may lie what another sequence left; its weight is 0, but 0 times
      // something not finite is not 0.
      if (to % 2) step(to / 2, V::iset(0xffff));
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
