// Plain C++ with the compiler's vector types: 16 lanes on any machine, whatever its registers hold.
// There is no fused multiply-add here, so that no machine falls into a library call.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace steppe::STEPPE_VARIANT {

struct V {
  static constexpr int W = 16;
  static constexpr int kMaxRows = 2;
  static constexpr bool kFullRange = true;
  static constexpr bool kPairs = false;
  typedef int32_t I __attribute__((vector_size(64)));
  typedef uint32_t U __attribute__((vector_size(64)));
  typedef float F __attribute__((vector_size(64)));
  typedef uint8_t B __attribute__((vector_size(64)));

  static I izero() { return I{}; }
  static I iset(int32_t x) { return I{} + x; }
  static I load(const void* p) {
    I x;
    std::memcpy(&x, p, 64);
    return x;
  }
  static I broadcast(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return iset(x);
  }
  static I iadd(I a, I b) { return a + b; }
  static I imax(I a, I b) { return a > b ? a : b; }
  static I iand(I a, I b) { return a & b; }
  static I ior(I a, I b) { return a | b; }
  static I shl(I a, int n) { return (I)((U)a << uint32_t(n)); }
  static I shr(I a, int n) { return (I)((U)a >> uint32_t(n)); }
  static I bits(const uint8_t* plane, int, int value) {
    B out;
    for (int i = 0; i < 64; i++) out[i] = (plane[i / 8] >> (i % 8)) & 1 ? uint8_t(value) : 0;
    return (I)out;
  }
  static I lookup(I index, const uint8_t* table16) {
    B in = (B)index, out;
    for (int i = 0; i < 64; i++) out[i] = table16[in[i] & 15];
    return (I)out;
  }
  template <bool Small>
  static I dp(I acc, I w, I a) {
    const U u = (U)w, s = (U)a;
    acc += (I)(u & 255u) * ((I)(s << 24) >> 24);
    acc += (I)((u >> 8) & 255u) * ((I)(s << 16) >> 24);
    acc += (I)((u >> 16) & 255u) * ((I)(s << 8) >> 24);
    acc += (I)(u >> 24) * (a >> 24);
    return acc;
  }

  static F zero() { return F{}; }
  static F set(float x) { return F{} + x; }
  static F loadf(const float* p) {
    F x;
    std::memcpy(&x, p, 64);
    return x;
  }
  static F loadf(const float* p, int n) {
    F x{};
    std::memcpy(&x, p, 4 * size_t(n < 16 ? n : 16));
    return x;
  }
  static void store(float* p, F x) { std::memcpy(p, &x, 64); }
  static void store(float* p, F x, int n) { std::memcpy(p, &x, 4 * size_t(n < 16 ? n : 16)); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F abs(F a) { return as_float(as_int(a) & 0x7fffffff); }
  static F round(F a) {
    F out;
    for (int i = 0; i < 16; i++) out[i] = nearbyintf(a[i]);
    return out;
  }
  static F cvt(I a) { return __builtin_convertvector(a, F); }
  static I cvt(F a) {
    I out;
    // Outside the integers (NaN too) the vector instructions give the least integer: so do we.
    for (int i = 0; i < 16; i++)
      out[i] = a[i] > -2e9f && a[i] < 2e9f ? int32_t(nearbyintf(a[i])) : INT32_MIN;
    return out;
  }
  static F as_float(I a) { return (F)a; }
  static I as_int(F a) { return (I)a; }
  static float hmax(F a) {
    float best = a[0];
    for (int i = 1; i < 16; i++) best = a[i] > best ? a[i] : best;
    return best;
  }
  static int32_t hmax(I a) {
    int32_t best = a[0];
    for (int i = 1; i < 16; i++) best = a[i] > best ? a[i] : best;
    return best;
  }
  static float hsum(F a) {
    float x[8];
    for (int i = 0; i < 8; i++) x[i] = a[i] + a[i + 8];
    for (int i = 0; i < 4; i++) x[i] += x[i + 4];
    return (x[0] + x[2]) + (x[1] + x[3]);
  }
  static int32_t hsum(I a) {
    int32_t total = 0;
    for (int i = 0; i < 16; i++) total += a[i];
    return total;
  }
  static F zero_below(F x, F limit, F y) { return as_float(as_int(y) & ~(x < limit)); }
  static F scaled(F x, F n) {
    const F y = as_float(iadd(as_int(x), shl(cvt(n), 23)));
    return zero_below(n, set(-126.0f), y);
  }
  static F keep(F x, int lo, int hi, F other) {
    F out;
    for (int i = 0; i < 16; i++) out[i] = i >= lo && i < hi ? x[i] : other[i];
    return out;
  }
  static float half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    float magnitude;
    if (rest >= 0x7c00) {
      const uint32_t x = 0x7f800000u | (rest & 0x3ff) << 13;
      std::memcpy(&magnitude, &x, 4);
    } else {
      // Exact: the shifted bits are the value times 2^-112, also for subnormal halves.
      const uint32_t x = rest << 13;
      std::memcpy(&magnitude, &x, 4);
      magnitude *= 0x1p112f;
    }
    uint32_t out;
    std::memcpy(&out, &magnitude, 4);
    out |= sign;
    std::memcpy(&magnitude, &out, 4);
    return magnitude;
  }
  static F half_to_float(const uint16_t* p) {
    F out;
    for (int i = 0; i < 16; i++) {
      uint16_t h;
      std::memcpy(&h, reinterpret_cast<const uint8_t*>(p) + 2 * i, 2);
      out[i] = half(h);
    }
    return out;
  }
  static uint16_t to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);  // NaN
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
    uint32_t half;
    if (rest >= 0x38800000) {
      half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    } else {
      // Subnormal: adding 0.5 rounds to multiples of 2^-24, which then stand in the low bits.
      float magnitude;
      std::memcpy(&magnitude, &rest, 4);
      magnitude += 0.5f;
      std::memcpy(&half, &magnitude, 4);
      half -= 0x3f000000;
    }
    return uint16_t(sign | half);
  }
  static void store_half(uint16_t* p, F a) {
    for (int i = 0; i < 16; i++) p[i] = to_half(a[i]);
  }
  static F u8_to_float(const uint8_t* p) {
    F out;
    for (int i = 0; i < 16; i++) out[i] = float(p[i]);
    return out;
  }
  static F i8_to_float(const int8_t* p) {
    F out;
    for (int i = 0; i < 16; i++) out[i] = float(p[i]);
    return out;
  }
  static void store_i8(int8_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = int8_t(a[i] < -128 ? -128 : a[i] > 127 ? 127 : a[i]);
  }
  static void store_bf16(uint16_t* p, F a) {
    const U x = (U)as_int(a);
    const U r = (x + ((x >> 16) & 1u) + 0x7fffu) >> 16;
    for (int i = 0; i < 16; i++) p[i] = uint16_t(r[i]);
  }
  static F dot_bf16(F acc, I a, I b) {
    const I high = iset(int32_t(0xffff0000));
    acc = as_float(shl(a, 16)) * as_float(shl(b, 16)) + acc;
    return as_float(a & high) * as_float(b & high) + acc;
  }
};

}  // namespace steppe::STEPPE_VARIANT
