// Attention of a tile of queries over the pages of one sequence.
//
// Keys come in blocks of 128. A block gives a row three things: its largest score, the sum of its
// weights (2 to the score minus that largest) and the weighted sum of its values. They are folded into
// the row's totals, which are rescaled when a larger score appears. Nothing of this depends on the
// other rows of the tile; rows are grouped only to load keys and values once for several.
#include "attention_bf16.h"
#include "attention_f16.h"
#include "attention_int8.h"
#ifdef __AMX_BF16__
#include "attention_amx.h"
#endif
#include "../core/kernels.h"
#include "variant.h"

namespace steppe::STEPPE_VARIANT {
namespace {

using F = V::F;
constexpr int W = V::W;

constexpr float kLogE = 1.44269504088896341f;

inline int least(int a, int b) { return a < b ? a : b; }
inline int most(int a, int b) { return a > b ? a : b; }

// 2^x for x <= 0: relative error under 3e-6, exact for 0; 0 below -126; NaN of NaN.
inline F power(F x) {
  const F y = V::max(V::set(-200.0f), x);
  const F n = V::round(y);
  const F f = V::sub(y, n);
  F p = V::set(9.582853220693941e-3f);
  p = V::fma(p, f, V::set(5.590642620811413e-2f));
  p = V::fma(p, f, V::set(2.402409861776416e-1f));
  p = V::fma(p, f, V::set(6.931241932253003e-1f));
  p = V::fma(p, f, V::set(1.0f));
  return V::scaled(p, n);
}

// What is known of a tile's rows while its blocks are walked.
struct TileState {
  int rows;
  int first[kAttentionRows], last[kAttentionRows];  // keys a row sees; neither falls
  float factor[kAttentionRows];                     // of its scores, to be exponents of 2
  float cap[kAttentionRows];                        // or, with a soft cap, of what is capped
  float top[kAttentionRows + W], total[kAttentionRows];
  float* sums;  // [rows][dims]
};

void see(TileState& s, const AttentionTile& t) {
  s.rows = t.tokens * t.heads;
  for (int r = 0; r < s.rows; r++) {
    s.last[r] = t.first_position + r / t.heads;
    s.first[r] = t.window > 0 ? most(0, s.last[r] - t.window + 1) : 0;
    s.top[r] = -__builtin_inff();
    s.total[r] = 0.0f;
  }
}

// Rows that see something of a block: [a, b).
void active_rows(const TileState& s, int block, int* a, int* b) {
  const int begin = block * kBlockKeys;
  *a = 0;
  *b = s.rows;
  while (*a < s.rows && s.last[*a] < begin) ++*a;
  while (*b > *a && s.first[*b - 1] >= begin + kBlockKeys) --*b;
}

// Adds what a block gave `count` rows from r on to their totals.
void fold(TileState& s, int r, int count, const float* tops, const float* totals, const float* sums,
          size_t stride, int dims) {
  float before[kAttentionGroup + W], of_block[kAttentionGroup + W];
  for (int i = 0; i < count; i += W) {
    const int n = least(W, count - i);
    const F old = V::loadf(s.top + r + i, n), now = V::loadf(tops + i, n);
    const F top = V::max(old, now);
    V::store(before + i, power(V::sub(old, top)));
    V::store(of_block + i, power(V::sub(now, top)));
    V::store(s.top + r + i, top, n);
  }
  for (int i = 0; i < count; i++) {
    const F a = V::set(before[i]), b = V::set(of_block[i]);
    s.total[r + i] = s.total[r + i] * before[i] + totals[i] * of_block[i];
    float* to = s.sums + size_t(r + i) * size_t(dims);
    const float* from = sums + size_t(i) * stride;
    for (int d = 0; d < dims; d += W)
      V::store(to + d, V::fma(V::loadf(from + d), b, V::mul(V::loadf(to + d), a)));
  }
}

void finish(const TileState& s, const AttentionTile& t, int dims) {
  for (int r = 0; r < s.rows; r++) {
    float* out = t.out + size_t(t.first_token + r / t.heads) * t.out_stride +
                 size_t(t.head + r % t.heads) * size_t(t.head_dim);
    const F inverse = V::set(1.0f / s.total[r]);
    const float* from = s.sums + size_t(r) * size_t(dims);
    for (int d = 0; d < t.head_dim; d += W)
      V::store(out + d, V::mul(V::loadf(from + d), inverse), least(W, t.head_dim - d));
  }
}

// The products of type T for any number of rows.
template <class T>
struct InVectors : T {
  template <int R, int NV>
  static void page_scores(const uint8_t* page, int from, int to, const Rows& rows, float* scores) {
    int v = from / W;
    const int end = (to + W - 1) / W;
    for (; v + NV <= end; v += NV) T::template keys<R, NV>(page, v, rows, scores);
    if constexpr (NV > 1) {
      for (; v + NV / 2 <= end; v += NV / 2) T::template keys<R, NV / 2>(page, v, rows, scores);
      for (; v < end; v++) T::template keys<R, 1>(page, v, rows, scores);
    }
  }

  // Scores of the rows with the keys of a block that `span` holds.
  template <int R = T::kRows>
  static void scores(int count, const KeySpan& span, const Rows& rows) {
    if (count == R) {
      for (int half = 0; half < 2; half++)
        if (span.to(half) > span.from(half))
          page_scores<R, T::kVectors>(span.page[half], span.from(half), span.to(half), rows,
                                      rows.scores + half * 64);
    } else if constexpr (R > 1) {
      scores<R - 1>(count, span, rows);
    }
  }

  // The weighted sums of the values.
  template <int R = T::kRows>
  static void sums(int count, const KeySpan& span, const Rows& rows, const float* factors) {
    constexpr int NV = T::kVectors;
    if (count == R) {
      int d = 0;
      for (; d + NV * W <= rows.layout->dims; d += NV * W)
        T::template values<R, NV>(span, rows, d, factors);
      if constexpr (NV > 1)
        for (; d < rows.layout->dims; d += W) T::template values<R, 1>(span, rows, d, factors);
    } else if constexpr (R > 1) {
      sums<R - 1>(count, span, rows, factors);
    }
  }
};

// The same for a row that sees all 128 keys, without a cap: what it does to each score is what the
// general way does, in the same order.
void soften_whole(float* x, F factor, float* top_out, float* total) {
  constexpr int NV = kBlockKeys / W;
  F v[NV];
  F best = V::set(-__builtin_inff());
  STEPPE_UNROLL
  for (int j = 0; j < NV; j++) {
    v[j] = V::mul(V::loadf(x + j * W), factor);
    best = V::max(best, v[j]);
  }
  *top_out = V::hmax(best);
  const F top = V::set(*top_out);
  F sum = V::zero();
  STEPPE_UNROLL
  for (int j = 0; j < NV; j++) {
    v[j] = power(V::sub(v[j], top));
    V::store(x + j * W, v[j]);
    sum = V::add(sum, v[j]);
  }
  *total = V::hsum(sum);
}

// From scores to weights: `tops` gets the largest score, `totals` the sum of weights.
template <class T>
void soften(const TileState& s, const AttentionTile& t, int r, int count, int block,
            const KeySpan& span, const Rows& rows, float* tops, float* totals, float* factors) {
  const int first = span.low / W * W, end = (span.high + W - 1) / W * W;
  const int begin = block * kBlockKeys;
  for (int i = 0; i < count; i++) {
    float* x = rows.scores + i * kBlockKeys;
    const int from = s.first[r + i] - begin, to = s.last[r + i] + 1 - begin;
    const F factor = V::set(s.factor[r + i]), cap = V::set(s.cap[r + i]);
    if (from <= 0 && to >= kBlockKeys && t.softcap == 0.0f) {
      soften_whole(x, factor, tops + i, totals + i);
      factors[i] = T::weigh(rows, i, span, first, end);
      continue;
    }
    const F nothing = V::set(-__builtin_inff());
    F best = nothing;
    for (int j = first; j < end; j += W) {
      F v = V::loadf(x + j);
      if (t.softcap > 0.0f) v = hyperbolic_tangent(V::mul(v, cap));
      v = V::mul(v, factor);
      if (from > j || to < j + W) v = V::keep(v, from - j, to - j, nothing);
      V::store(x + j, v);
      best = V::max(best, v);
    }
    tops[i] = V::hmax(best);
    const F top = V::set(tops[i]);
    F sum = V::zero();
    for (int j = first; j < end; j += W) {
      const F p = power(V::sub(V::loadf(x + j), top));
      V::store(x + j, p);
      sum = V::add(sum, p);
    }
    totals[i] = V::hsum(sum);
    factors[i] = T::weigh(rows, i, span, first, end);
  }
}

template <class T>
void attention(const AttentionTile& t, float* scratch) {
  const KvLayout layout = kv_layout(T::kType, t.head_dim);
  const size_t dims = size_t(layout.dims);
  TileState s;
  see(s, t);
  Rows rows{};
  rows.layout = &layout;
  rows.dim = t.head_dim;
  rows.query_stride = T::query_bytes(t.head_dim);
  // Vectors that straddle cache lines cost twice: everything here begins at one.
  float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
  uint8_t* queries = reinterpret_cast<uint8_t*>(at);
  s.sums = at + size_t(kAttentionRows) * dims;
  rows.scores = s.sums + size_t(kAttentionRows) * dims;
  rows.weights = reinterpret_cast<uint8_t*>(rows.scores + kAttentionGroup * kBlockKeys);
  rows.sums = rows.scores + 2 * kAttentionGroup * kBlockKeys;
  rows.sums_stride = dims;
  for (int r = 0; r < s.rows; r++) {
    const float* q = t.q + size_t(t.first_token + r / t.heads) * t.q_stride +
                     size_t(t.head + r % t.heads) * size_t(t.head_dim);
    const float scale =
        t.scale * T::pack_query(q, t.head_dim, queries + size_t(r) * rows.query_stride);
    s.cap[r] = t.softcap > 0.0f ? scale / t.softcap : 0.0f;
    s.factor[r] = (t.softcap > 0.0f ? t.softcap : scale) * kLogE;
  }
  if (!t.partials)
    for (size_t i = 0; i < size_t(s.rows) * dims; i++) s.sums[i] = 0.0f;

  const size_t stride = partial_floats(t.head_dim);
  const int tile_first = first_block_of(t.first_position, t.window);
  for (int block = t.first_block; block < t.end_block; block++) {
    const int begin = block * kBlockKeys;
    int a, b;
    active_rows(s, block, &a, &b);
    for (int r = a; r < b; r += T::kRows) {
      const int count = least(T::kRows, b - r);
      KeySpan span{};
      span.low = most(0, s.first[r] - begin);
      span.high = least(kBlockKeys, s.last[r + count - 1] + 1 - begin);
      for (int half = 0; half < 2; half++)
        if (span.to(half) > span.from(half))
          span.page[half] = t.keys.base +
                            size_t(t.keys.pages[2 * block + half]) * t.keys.page_bytes +
                            size_t(t.kv_head) * layout.head_bytes;
      rows.queries = queries + size_t(r) * rows.query_stride;
      float tops[kAttentionGroup], totals[kAttentionGroup], factors[kAttentionGroup];
      T::scores(count, span, rows);
      soften<T>(s, t, r, count, block, span, rows, tops, totals, factors);
      T::sums(count, span, rows, factors);
      if (!t.partials) {
        fold(s, r, count, tops, totals, rows.sums, dims, int(dims));
        continue;
      }
      float* partial =
          t.partials + (size_t(block - tile_first) * size_t(s.rows) + size_t(r)) * stride;
      for (int i = 0; i < count; i++, partial += stride) {
        __builtin_memcpy(partial, rows.sums + size_t(i) * dims, dims * sizeof(float));
        partial[dims] = tops[i];
        partial[dims + 1] = totals[i];
      }
    }
  }
  if (!t.partials) finish(s, t, int(dims));
}

void merge(const AttentionTile& t, float* scratch) {
  const size_t dims = round_up(size_t(t.head_dim), 16), stride = partial_floats(t.head_dim);
  TileState s;
  see(s, t);
  s.sums = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64);
  for (size_t i = 0; i < size_t(s.rows) * dims; i++) s.sums[i] = 0.0f;
  const int tile_first = first_block_of(t.first_position, t.window);
  for (int block = tile_first; block < end_block_of(t.first_position, t.tokens); block++) {
    int a, b;
    active_rows(s, block, &a, &b);
    for (int r = a; r < b; r++) {
      const float* partial =
          t.partials + (size_t(block - tile_first) * size_t(s.rows) + size_t(r)) * stride;
      fold(s, r, 1, partial + dims, partial + dims + 1, partial, stride, int(dims));
    }
  }
  finish(s, t, int(dims));
}

#ifdef __AMX_BF16__
template <class InTiles, class Vectors>
void attention_in_tiles(const AttentionTile& t, float* scratch) {
  if (!InTiles::takes(t.head_dim)) return attention<InVectors<Vectors>>(t, scratch);
  const Tiles tiles(kAttentionTiles);
  attention<InTiles>(t, scratch);
}
#endif

}  // namespace

void add_attention(Kernels& k) {
#ifdef __AMX_BF16__
  k.attention[int(KvType::BF16)] = attention_in_tiles<Bf16Tiles, Bf16>;
  k.attention[int(KvType::INT8)] = attention_in_tiles<Int8Tiles, Int8>;
#else
  k.attention[int(KvType::BF16)] = attention<InVectors<Bf16>>;
  k.attention[int(KvType::INT8)] = attention<InVectors<Int8>>;
#endif
  k.attention[int(KvType::F16)] = attention<InVectors<F16>>;
  k.merge = merge;
}

}  // namespace steppe::STEPPE_VARIANT
