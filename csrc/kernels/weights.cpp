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

// Eight lanes whatever the registers' width, added up in one order: the same bits everywhere. Two
// rounds of them run side by side, since each is one long chain of operations.
constexpr int kLanes = 8;
constexpr int kVectors = kLanes / L;
constexpr int kRound = 2 * kLanes;
using Round = Doubles[2 * kVectors];

#define STEPPE_ALWAYS inline __attribute__((always_inline))

STEPPE_ALWAYS Doubles all(double x) { return Doubles{} + x; }

// One over the factorials from 11 down to 0.
constexpr double kSeries[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                              1.0 / 5040,     1.0 / 720,     1.0 / 120,    1.0 / 24,
                              1.0 / 6,        1.0 / 2,       1.0,          1.0};

// exp(z) for z <= 0, relative error under 2^-46; 1 for 0, and 0 below -700, where no sum sees it.
STEPPE_ALWAYS void falling_exponential(Round& z) {
  const Doubles magic = all(0x1.8p52);  // added, it rounds to an integer in the lowest bits
  Round shifted, r, p;
  STEPPE_UNROLL
  for (int v = 0; v < 2 * kVectors; v++) {
    shifted[v] = z[v] * all(0x1.71547652b82fep0) + magic;
    const Doubles n = shifted[v] - magic;
    r[v] = z[v] - n * all(0x1.62e42fee00000p-1) - n * all(0x1.a39ef35793c76p-33);
    p[v] = all(kSeries[0]);
  }
  STEPPE_UNROLL
  for (int i = 1; i < 12; i++) {
    STEPPE_UNROLL
    for (int v = 0; v < 2 * kVectors; v++) p[v] = p[v] * r[v] + all(kSeries[i]);
  }
  STEPPE_UNROLL
  for (int v = 0; v < 2 * kVectors; v++) {
    const Longs scaled = (Longs)p[v] + ((Longs)shifted[v] << 52);
    z[v] = (Doubles)(scaled & (z[v] >= all(-700.0)));
  }
}

STEPPE_ALWAYS void weigh_round(const float* x, Doubles scale, Doubles top, Doubles least,
                               Round& w) {
  STEPPE_UNROLL
  for (int v = 0; v < 2 * kVectors; v++) {
    Floats f;
    __builtin_memcpy(&f, x + v * L, sizeof(f));
    w[v] = (__builtin_convertvector(f, Doubles) - top) * scale;
  }
  falling_exponential(w);
  STEPPE_UNROLL
  for (int v = 0; v < 2 * kVectors; v++) w[v] = (Doubles)((Longs)w[v] & (w[v] >= least));
}

void weigh(const float* x, int n, double scale, double top, double least, double* sums,
           double* weights) {
  const Doubles s = all(scale), t = all(top), l = all(least);
  for (int block = 0; block < n; block += kWeightBlock) {
    const int end = n - block < kWeightBlock ? n : block + kWeightBlock;
    Doubles sum[kVectors] = {};
    for (int i = block; i < end; i += kRound) {
      float rest[kRound];
      const int here = end - i < kRound ? end - i : kRound;
      for (int j = here; j < kRound; j++) rest[j] = -__builtin_inff();
      if (here < kRound) __builtin_memcpy(rest, x + i, sizeof(float) * size_t(here));
      Round w;
      weigh_round(here < kRound ? rest : x + i, s, t, l, w);
      STEPPE_UNROLL
      for (int v = 0; v < 2 * kVectors; v++) sum[v % kVectors] += w[v];
      if (weights) __builtin_memcpy(weights + i, w, sizeof(double) * size_t(here));
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
