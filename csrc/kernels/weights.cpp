// Kernels of the sampler: weights of a row's tokens in double precision, and maxima of its blocks.
#include "../core/kernels.h"
#include "variant.h"
#include "vec.h"

namespace steppe::STEPPE_VARIANT {
namespace {

#if defined(__AVX512BW__)
constexpr int L = 8;
#elif defined(__AVX2__)
constexpr int L = 4;
#else
constexpr int L = 2;
#endif

typedef double Doubles __attribute__((vector_size(8 * L)));
typedef uint64_t Longs __attribute__((vector_size(8 * L)));
typedef float Floats __attribute__((vector_size(4 * L)));

// Eight lanes whatever the registers' width, added up in one order: the same bits everywhere.
constexpr int kLanes = 8;
constexpr int kVectors = kLanes / L;

inline Doubles all(double x) { return Doubles{} + x; }

// exp(z) for z <= 0, relative error under 2^-46; 1 for 0, and 0 below -700, where no sum sees it.
inline Doubles falling_exponential(Doubles z) {
  const Doubles magic = all(0x1.8p52);  // added, it rounds to an integer in the lowest bits
  const Doubles shifted = z * all(0x1.71547652b82fep0) + magic;
  const Doubles n = shifted - magic;
  const Doubles r = z - n * all(0x1.62e42fee00000p-1) - n * all(0x1.a39ef35793c76p-33);
  Doubles p = all(1.0 / 39916800);
  p = p * r + all(1.0 / 3628800);
  p = p * r + all(1.0 / 362880);
  p = p * r + all(1.0 / 40320);
  p = p * r + all(1.0 / 5040);
  p = p * r + all(1.0 / 720);
  p = p * r + all(1.0 / 120);
  p = p * r + all(1.0 / 24);
  p = p * r + all(1.0 / 6);
  p = p * r + all(1.0 / 2);
  p = p * r + all(1.0);
  p = p * r + all(1.0);
  const Longs scaled = (Longs)p + ((Longs)shifted << 52);
  return (Doubles)(scaled & (z >= all(-700.0)));
}

void weigh_lanes(const float* x, Doubles scale, Doubles top, Doubles least, Doubles (&w)[kVectors]) {
  STEPPE_UNROLL
  for (int v = 0; v < kVectors; v++) {
    Floats f;
    __builtin_memcpy(&f, x + v * L, sizeof(f));
    const Doubles e = falling_exponential((__builtin_convertvector(f, Doubles) - top) * scale);
    w[v] = (Doubles)((Longs)e & (e >= least));
  }
}

void weigh(const float* x, int n, double scale, double top, double least, double* sums,
           double* weights) {
  const Doubles s = all(scale), t = all(top), l = all(least);
  for (int block = 0; block < n; block += kWeightBlock) {
    const int end = n - block < kWeightBlock ? n : block + kWeightBlock;
    Doubles sum[kVectors] = {};
    for (int i = block; i < end; i += kLanes) {
      Doubles w[kVectors];
      if (end - i >= kLanes) {
        weigh_lanes(x + i, s, t, l, w);
      } else {
        float rest[kLanes];
        for (int j = 0; j < kLanes; j++) rest[j] = j < end - i ? x[i + j] : -__builtin_inff();
        weigh_lanes(rest, s, t, l, w);
      }
      STEPPE_UNROLL
      for (int v = 0; v < kVectors; v++) sum[v] += w[v];
      if (weights)
        __builtin_memcpy(weights + i, w, sizeof(double) * size_t(end - i < kLanes ? end - i : kLanes));
    }
    if (sums) {
      double lanes[kLanes];
      __builtin_memcpy(lanes, sum, sizeof(lanes));
      for (int half = kLanes / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] += lanes[j + half];
      sums[block / kWeightBlock] = lanes[0];
    }
  }
}

void block_tops(const float* x, int n, float* tops) {
  constexpr int W = V::W;
  for (int block = 0; block < n; block += kWeightBlock) {
    const int end = n - block < kWeightBlock ? n : block + kWeightBlock;
    const V::F never = V::set(-__builtin_inff());
    V::F best = never;
    int i = block;
    // In this order a NaN never wins, nor stays.
    for (; i + W <= end; i += W) best = V::max(V::loadf(x + i), best);
    if (i < end) best = V::max(V::keep(V::loadf(x + i, end - i), 0, end - i, never), best);
    tops[block / kWeightBlock] = V::hmax(best);
  }
}

}  // namespace

void add_weights(Kernels& k) {
  k.weigh = weigh;
  k.block_tops = block_tops;
}

}  // namespace steppe::STEPPE_VARIANT
