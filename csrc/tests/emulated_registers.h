// What instructions of AVX-512, VNNI and bf16 do to the lanes of a register (emulated.h).
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// As a template's argument a register loses that it may stand for anything: all goes through memcpy.
#pragma GCC diagnostic ignored "-Wignored-attributes"

// Internal linkage, like the intrinsics of a compiler's headers: each variant has its own copies. They
// are calls: the kernels unroll far, and lanes on top of that would take minutes to compile.
namespace {
namespace emulated {

#define STEPPE_INSTRUCTION [[gnu::noinline, maybe_unused]]

template <class T, class Vector>
struct Lanes {
  static constexpr int kCount = int(sizeof(Vector) / sizeof(T));
  T x[kCount];
  Lanes() = default;
  explicit Lanes(Vector v) { std::memcpy(x, &v, sizeof v); }
  Vector vector() const {
    Vector v;
    std::memcpy(&v, x, sizeof v);
    return v;
  }
};
template <class T, class Vector, class Function>
Vector each(Vector a, Function f) {
  Lanes<T, Vector> x(a);
  for (T& lane : x.x) lane = f(lane);
  return x.vector();
}
template <class T, class Vector, class Function>
Vector each(Vector a, Vector b, Function f) {
  Lanes<T, Vector> x(a);
  const Lanes<T, Vector> y(b);
  for (int i = 0; i < x.kCount; i++) x.x[i] = f(x.x[i], y.x[i]);
  return x.vector();
}
template <class Vector, class T>
STEPPE_INSTRUCTION Vector all(T value) {
  Lanes<T, Vector> x;
  for (T& lane : x.x) lane = value;
  return x.vector();
}
template <class Vector>
STEPPE_INSTRUCTION Vector loaded(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated processor: %s\n", what);
  std::abort();
}
template <class Vector>
STEPPE_INSTRUCTION void store_aligned(void* p, Vector v) {
  check(reinterpret_cast<uintptr_t>(p) % sizeof v == 0, "an aligned store to what is not aligned");
  std::memcpy(p, &v, sizeof v);
}
template <int N>
int32_t saturated(int32_t x) {
  constexpr int32_t most = (1 << (N - 1)) - 1;
  return x > most ? most : x < -most - 1 ? -most - 1 : x;
}
// Four products of bytes, signed or not: the sum wraps, as the accumulator does.
template <class A, class B>
int32_t products_of_bytes(int32_t acc, const A* a, const B* b) {
  uint32_t sum = uint32_t(acc);
  for (int i = 0; i < 4; i++) sum += uint32_t(int32_t(a[i]) * int32_t(b[i]));
  return int32_t(sum);
}
template <class Vector>
STEPPE_INSTRUCTION Vector dpbusd(Vector acc, Vector w, Vector a) {
  Lanes<int32_t, Vector> sums(acc);
  const Lanes<uint8_t, Vector> x(w);
  const Lanes<int8_t, Vector> y(a);
  for (int i = 0; i < sums.kCount; i++)
    sums.x[i] = products_of_bytes(sums.x[i], x.x + 4 * i, y.x + 4 * i);
  return sums.vector();
}
// The bf16 instructions take subnormals for 0 and give 0 for them, and round to nearest even.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float widened(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return flushed(x);
}
inline float products_of_bf16(float acc, const uint16_t* a, const uint16_t* b) {
  for (int i = 1; i >= 0; i--)  // the odd one first
    acc = flushed(std::fma(widened(a[i]), widened(b[i]), flushed(acc)));
  return acc;
}

template <class T>
STEPPE_INSTRUCTION __m512i widened_lanes(__m128i narrow) {
  const Lanes<T, __m128i> x(narrow);
  Lanes<int32_t, __m512i> out;
  for (int i = 0; i < out.kCount; i++) out.x[i] = x.x[i];
  return out.vector();
}
STEPPE_INSTRUCTION float most(__m512 a) {
  Lanes<float, __m512> x(a);
  for (int i = 1; i < 16; i++) x.x[0] = x.x[i] > x.x[0] ? x.x[i] : x.x[0];
  return x.x[0];
}
STEPPE_INSTRUCTION int32_t most(__m512i a) {
  Lanes<int32_t, __m512i> x(a);
  for (int i = 1; i < 16; i++) x.x[0] = x.x[i] > x.x[0] ? x.x[i] : x.x[0];
  return x.x[0];
}
// By halves, as compilers write it.
STEPPE_INSTRUCTION float total(__m512 a) {
  Lanes<float, __m512> x(a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) x.x[i] += x.x[i + half];
  return x.x[0];
}
STEPPE_INSTRUCTION int32_t total(__m512i a) {
  const Lanes<uint32_t, __m512i> x(a);
  uint32_t sum = 0;
  for (uint32_t lane : x.x) sum += lane;
  return int32_t(sum);
}

STEPPE_INSTRUCTION __m512i sub8(__m512i a, __m512i b) {
  return each<uint8_t>(a, b, [](uint8_t x, uint8_t y) { return uint8_t(x - y); });
}
STEPPE_INSTRUCTION __m512i shl32(__m512i a, unsigned n) {
  return each<uint32_t>(a, [n](uint32_t x) { return n > 31 ? 0u : x << n; });
}
STEPPE_INSTRUCTION __m512i shr32(__m512i a, unsigned n) {
  return each<uint32_t>(a, [n](uint32_t x) { return n > 31 ? 0u : x >> n; });
}
STEPPE_INSTRUCTION __m512i shl16(__m512i a, unsigned n) {
  return each<uint16_t>(a, [n](uint16_t x) { return uint16_t(n > 15 ? 0 : x << n); });
}
STEPPE_INSTRUCTION __m512i shr16(__m512i a, unsigned n) {
  return each<uint16_t>(a, [n](uint16_t x) { return uint16_t(n > 15 ? 0 : x >> n); });
}
STEPPE_INSTRUCTION __m512i sar16(__m512i a, unsigned n) {
  return each<int16_t>(a, [n](int16_t x) { return int16_t(x >> (n > 15 ? 15 : n)); });
}
STEPPE_INSTRUCTION __m512 greater(__m512 a, __m512 b) {
  return each<__m256>(a, b, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
}
STEPPE_INSTRUCTION __m512 less(__m512 a, __m512 b) {
  return each<__m256>(a, b, [](__m256 x, __m256 y) { return _mm256_min_ps(x, y); });
}
STEPPE_INSTRUCTION __m512 absolute(__m512 a) {
  return each<float>(a, [](float x) { return std::fabs(x); });
}
STEPPE_INSTRUCTION __m512i add32(__m512i a, __m512i b) {
  return each<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; });
}
STEPPE_INSTRUCTION __m512i max32(__m512i a, __m512i b) {
  return each<int32_t>(a, b, [](int32_t x, int32_t y) { return x > y ? x : y; });
}
STEPPE_INSTRUCTION __m512i shuffle8(__m512i table, __m512i index) {
  const Lanes<uint8_t, __m512i> t(table), i(index);
  Lanes<uint8_t, __m512i> out;
  for (int j = 0; j < 64; j++) out.x[j] = i.x[j] & 128 ? 0 : t.x[j / 16 * 16 + (i.x[j] & 15)];
  return out.vector();
}
STEPPE_INSTRUCTION __m512i madd16(__m512i a, __m512i b) {
  const Lanes<int16_t, __m512i> x(a), y(b);
  Lanes<int32_t, __m512i> out;
  for (int i = 0; i < 16; i++)
    out.x[i] = int32_t(uint32_t(x.x[2 * i] * y.x[2 * i]) + uint32_t(x.x[2 * i + 1] * y.x[2 * i + 1]));
  return out.vector();
}
STEPPE_INSTRUCTION __m512i maddubs16(__m512i a, __m512i b) {
  const Lanes<uint8_t, __m512i> x(a);
  const Lanes<int8_t, __m512i> y(b);
  Lanes<int16_t, __m512i> out;
  for (int i = 0; i < 32; i++)
    out.x[i] = int16_t(saturated<16>(x.x[2 * i] * y.x[2 * i] + x.x[2 * i + 1] * y.x[2 * i + 1]));
  return out.vector();
}
STEPPE_INSTRUCTION __m512i set8_where(uint64_t mask, int8_t value) {
  Lanes<int8_t, __m512i> out;
  for (int i = 0; i < 64; i++) out.x[i] = mask >> i & 1 ? value : int8_t(0);
  return out.vector();
}
STEPPE_INSTRUCTION __m512 selected(__m512 otherwise, uint16_t mask, __m512 a) {
  Lanes<float, __m512> out(otherwise);
  const Lanes<float, __m512> x(a);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) out.x[i] = x.x[i];
  return out.vector();
}
STEPPE_INSTRUCTION __m512 load_where(uint16_t mask, const float* p) {
  Lanes<float, __m512> out;
  for (int i = 0; i < 16; i++) out.x[i] = mask >> i & 1 ? p[i] : 0.0f;
  return out.vector();
}
STEPPE_INSTRUCTION void store_where(float* p, uint16_t mask, __m512 a) {
  const Lanes<float, __m512> x(a);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) p[i] = x.x[i];
}
template <int predicate>
STEPPE_INSTRUCTION uint16_t not_less(__m512 a, __m512 b) {  // or unordered
  static_assert(predicate == _CMP_NLT_UQ, "only this comparison");
  const Lanes<float, __m512> x(a), y(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; i++) mask |= unsigned(!(x.x[i] < y.x[i])) << i;
  return uint16_t(mask);
}
STEPPE_INSTRUCTION __m512 to_float(__m512i a) {
  const Lanes<int32_t, __m512i> x(a);
  Lanes<float, __m512> out;
  for (int i = 0; i < 16; i++) out.x[i] = float(x.x[i]);
  return out.vector();
}
STEPPE_INSTRUCTION __m512i to_int(__m512 a) {
  const Lanes<__m256, __m512> x(a);
  Lanes<__m256i, __m512i> out;
  for (int i = 0; i < 2; i++) out.x[i] = _mm256_cvtps_epi32(x.x[i]);
  return out.vector();
}
STEPPE_INSTRUCTION __m512 fused(__m512 a, __m512 b, __m512 c) {
  const Lanes<__m256, __m512> x(a), y(b), z(c);
  Lanes<__m256, __m512> out;
  for (int i = 0; i < 2; i++) out.x[i] = _mm256_fmadd_ps(x.x[i], y.x[i], z.x[i]);
  return out.vector();
}
template <int how>
STEPPE_INSTRUCTION __m512 rounded(__m512 a) {
  static_assert(how == 8, "only to a whole number, to nearest even, without exceptions");
  return each<__m256>(a, [](__m256 x) { return _mm256_round_ps(x, 8); });
}
STEPPE_INSTRUCTION __m512 scale_by(__m512 a, __m512 b) {
  return each<float>(a, b, [](float x, float n) { return std::ldexp(x, int(std::floor(n))); });
}
STEPPE_INSTRUCTION __m512 from_half(__m256i a) {
  const Lanes<__m128i, __m256i> x(a);
  Lanes<__m256, __m512> out;
  for (int i = 0; i < 2; i++) out.x[i] = _mm256_cvtph_ps(x.x[i]);
  return out.vector();
}
template <int how>
STEPPE_INSTRUCTION __m256i to_half(__m512 a) {
  static_assert(how == 0, "only to nearest even");
  const Lanes<__m256, __m512> x(a);
  Lanes<__m128i, __m256i> out;
  for (int i = 0; i < 2; i++) out.x[i] = _mm256_cvtps_ph(x.x[i], 0);
  return out.vector();
}
STEPPE_INSTRUCTION __m128i to_bytes(__m512i a) {
  const Lanes<int32_t, __m512i> x(a);
  Lanes<int8_t, __m128i> out;
  for (int i = 0; i < 16; i++) out.x[i] = int8_t(saturated<8>(x.x[i]));
  return out.vector();
}
STEPPE_INSTRUCTION __m256i low_words(__m512i a) {
  const Lanes<uint32_t, __m512i> x(a);
  Lanes<uint16_t, __m256i> out;
  for (int i = 0; i < 16; i++) out.x[i] = uint16_t(x.x[i]);
  return out.vector();
}
STEPPE_INSTRUCTION __m256bh to_bf16(__m512 a) {
  const Lanes<float, __m512> x(a);
  Lanes<uint16_t, __m256bh> out;
  for (int i = 0; i < 16; i++) {
    const float y = flushed(x.x[i]);
    uint32_t bits;
    std::memcpy(&bits, &y, 4);
    if (y != y) bits |= 1u << 22;
    else bits += 0x7fffu + (bits >> 16 & 1);
    out.x[i] = uint16_t(bits >> 16);
  }
  return out.vector();
}
STEPPE_INSTRUCTION __m512 dpbf16(__m512 acc, __m512bh a, __m512bh b) {
  Lanes<float, __m512> sums(acc);
  const Lanes<uint16_t, __m512bh> x(a), y(b);
  for (int i = 0; i < 16; i++) sums.x[i] = products_of_bf16(sums.x[i], x.x + 2 * i, y.x + 2 * i);
  return sums.vector();
}

}  // namespace emulated
}  // namespace
