// AVX-512: 16 lanes. VNNI and BF16 instructions where the flags of this translation unit have them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace steppe::STEPPE_VARIANT {

struct V {
  static constexpr int W = 16;
  static constexpr int kMaxRows = 8;   // rows of a tile whose accumulators fit the registers
#ifdef __AVX512VNNI__
  static constexpr bool kFullRange = true;   // dp takes weights up to 255 at full speed
#else
  static constexpr bool kFullRange = false;
#endif
  static constexpr bool kPairs = false;
  using I = __m512i;
  using F = __m512;

  static I izero() { return _mm512_setzero_si512(); }
  static I iset(int32_t x) { return _mm512_set1_epi32(x); }
  static I load(const void* p) { return _mm512_loadu_si512(p); }
  static I broadcast(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
  static I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static I ior(I a, I b) { return _mm512_or_si512(a, b); }
  static I shl(I a, int n) { return _mm512_slli_epi32(a, unsigned(n)); }
  static I shr(I a, int n) { return _mm512_srli_epi32(a, unsigned(n)); }
  // `value` in each byte whose bit is set.
  static I bits(const uint8_t* plane, int, int value) {
    uint64_t m;
    std::memcpy(&m, plane, 8);
    return _mm512_maskz_set1_epi8(m, char(value));
  }
  // Hides a sum from g++, which would make a tree of many: with all their terms in memory first.
  static I in_order(I sum) {
#ifndef STEPPE_EMULATED  // there it is in memory anyway
    __asm__("" : "+v"(sum));
#endif
    return sum;
  }
  static I lookup(I index, const uint8_t* table16) {
    const I t = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table16)));
    return _mm512_shuffle_epi8(t, index);
  }
  // acc + the four products of each lane; w unsigned, a signed bytes. Small: w <= 127.
  template <bool Small>
  static I dp(I acc, I w, I a) {
#ifdef __AVX512VNNI__
    return _mm512_dpbusd_epi32(acc, w, a);
#else
    if constexpr (Small) {
      const I sums = _mm512_madd_epi16(_mm512_maddubs_epi16(w, a), _mm512_set1_epi16(1));
      return in_order(_mm512_add_epi32(acc, sums));
    } else {
      const I even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(255)),
                                       _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8));
      const I odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(a, 8));
      return in_order(_mm512_add_epi32(acc, _mm512_add_epi32(even, odd)));
    }
#endif
  }

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F loadf(const float* p) { return _mm512_loadu_ps(p); }
  static F loadf(const float* p, int n) {
    return _mm512_maskz_loadu_ps(__mmask16(n >= 16 ? 0xffff : (1u << n) - 1), p);
  }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store(float* p, F x, int n) {
    _mm512_mask_storeu_ps(p, __mmask16(n >= 16 ? 0xffff : (1u << n) - 1), x);
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F round(F a) { return _mm512_roundscale_ps(a, 8); }
  static F cvt(I a) { return _mm512_cvtepi32_ps(a); }
  static I cvt(F a) { return _mm512_cvtps_epi32(a); }
  static F as_float(I a) { return _mm512_castsi512_ps(a); }
  static I as_int(F a) { return _mm512_castps_si512(a); }
  static float hmax(F a) { return _mm512_reduce_max_ps(a); }
  static int32_t hmax(I a) { return _mm512_reduce_max_epi32(a); }
  static float hsum(F a) { return _mm512_reduce_add_ps(a); }
  static int32_t hsum(I a) { return _mm512_reduce_add_epi32(a); }
  // x < limit ? 0 : y
  static F zero_below(F x, F limit, F y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
  }
  // x * 2^n for a whole n from -200 to 0; 0 or a subnormal where n < -126
  static F scaled(F x, F n) { return _mm512_scalef_ps(x, n); }
  // lanes [lo, hi) of x, `other` elsewhere
  static F keep(F x, int lo, int hi, F other) {
    lo = lo < 0 ? 0 : lo;
    hi = hi > 16 ? 16 : hi;
    const unsigned m = hi <= lo ? 0u : ((1u << hi) - 1) & ~((1u << lo) - 1);
    return _mm512_mask_mov_ps(other, __mmask16(m), x);
  }
  static F half_to_float(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_half(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, 0));  // to nearest even
  }
  static F u8_to_float(const uint8_t* p) {
    return cvt(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F i8_to_float(const int8_t* p) {
    return cvt(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static void store_i8(int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
  }
  static void store_bf16(uint16_t* p, F a) {
#ifdef __AVX512BF16__
    const __m256bh h = _mm512_cvtneps_pbh(a);
    std::memcpy(p, &h, 32);
#else
    const I x = as_int(a);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const I r = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(x, odd), _mm512_set1_epi32(0x7fff)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
#endif
  }
  // acc + products of the two bf16 of each lane
  static F dot_bf16(F acc, I a, I b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    const I high = _mm512_set1_epi32(int32_t(0xffff0000));
    acc = fma(as_float(_mm512_slli_epi32(a, 16)), as_float(_mm512_slli_epi32(b, 16)), acc);
    return fma(as_float(_mm512_and_si512(a, high)), as_float(_mm512_and_si512(b, high)), acc);
#endif
  }
};

}  // namespace steppe::STEPPE_VARIANT
