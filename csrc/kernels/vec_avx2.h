// AVX2, FMA and F16C: 8 lanes. AVX-VNNI where the flags of this translation unit have it.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace steppe::STEPPE_VARIANT {

struct V {
  static constexpr int W = 8;
  static constexpr int kMaxRows = 4;
#ifdef __AVXVNNI__
  static constexpr bool kFullRange = true;
  static constexpr bool kPairs = false;
#else
  static constexpr bool kFullRange = false;
  static constexpr bool kPairs = true;
#endif
  using I = __m256i;
  using F = __m256;

  static I izero() { return _mm256_setzero_si256(); }
  static I iset(int32_t x) { return _mm256_set1_epi32(x); }
  static I load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static I broadcast(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
  }
  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static I imax(I a, I b) { return _mm256_max_epi32(a, b); }
  static I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static I ior(I a, I b) { return _mm256_or_si256(a, b); }
  static I shl(I a, int n) { return _mm256_slli_epi32(a, n); }
  static I shr(I a, int n) { return _mm256_srli_epi32(a, n); }
  static I bits(const uint8_t* plane, int half, int value) {
    // Each of the 4 plane bytes is spread over 8 lanes of bytes, and each lane tests its own bit.
    const I spread = _mm256_shuffle_epi8(
        broadcast(plane + 4 * half),
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                         3, 3, 3, 3, 3, 3, 3));
    const I bit = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit),
                            _mm256_set1_epi8(char(value)));
  }
  // Hides a sum from g++, which would make a tree of many: with all their terms in memory first.
  static I in_order(I sum) {
    __asm__("" : "+x"(sum));
    return sum;
  }
  static I lookup(I index, const uint8_t* table16) {
    const I t = _mm256_broadcastsi128_si256(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(table16)));
    return _mm256_shuffle_epi8(t, index);
  }
  template <bool Small>
  static I dp(I acc, I w, I a) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(acc, w, a);
#else
    if constexpr (Small) {
      const I sums = _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1));
      return in_order(_mm256_add_epi32(acc, sums));
    } else {
      // Two products of a full byte would saturate 16 bits: widen first.
      const I even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                       _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8));
      const I odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(a, 8));
      return in_order(_mm256_add_epi32(acc, _mm256_add_epi32(even, odd)));
    }
#endif
  }

  // What dp is made of where there is no instruction for it: sums of two products in 16 bits. The
  // caller sees to it that they fit.
  static I pairs(I w, I a) { return _mm256_maddubs_epi16(w, a); }
  static I add_pairs(I a, I b) { return in_order(_mm256_add_epi16(a, b)); }
  static I fold_pairs(I acc, I x) {
    return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(x, _mm256_set1_epi16(1))));
  }
  // Bytes around 128 as signed ones, their magnitudes, and `a` with their signs.
  static I around_zero(I w) { return _mm256_xor_si256(w, _mm256_set1_epi8(char(0x80))); }
  static I magnitude(I w) { return _mm256_abs_epi8(w); }
  static I signed_by(I a, I w) { return _mm256_sign_epi8(a, w); }

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F loadf(const float* p) { return _mm256_loadu_ps(p); }
  static I mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F loadf(const float* p, int n) { return _mm256_maskload_ps(p, mask(n)); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store(float* p, F x, int n) { _mm256_maskstore_ps(p, mask(n), x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F a) { return as_float(iand(as_int(a), iset(0x7fffffff))); }
  static F round(F a) { return _mm256_round_ps(a, 8); }
  static F cvt(I a) { return _mm256_cvtepi32_ps(a); }
  static I cvt(F a) { return _mm256_cvtps_epi32(a); }
  static F as_float(I a) { return _mm256_castsi256_ps(a); }
  static I as_int(F a) { return _mm256_castps_si256(a); }
  static float hmax(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static int32_t hmax(I a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
  }
  static float hsum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static int32_t hsum(I a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
  }
  static F zero_below(F x, F limit, F y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y);
  }
  static F scaled(F x, F n) {
    const F y = as_float(iadd(as_int(x), shl(cvt(n), 23)));
    return zero_below(n, set(-126.0f), y);
  }
  static F keep(F x, int lo, int hi, F other) {
    const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const I in = _mm256_andnot_si256(_mm256_cmpgt_epi32(iset(lo), lane),
                                     _mm256_cmpgt_epi32(iset(hi), lane));
    return _mm256_blendv_ps(other, x, as_float(in));
  }
  static F half_to_float(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_half(uint16_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, 0));  // to nearest even
  }
  static F u8_to_float(const uint8_t* p) {
    return cvt(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static F i8_to_float(const int8_t* p) {
    return cvt(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static void store_i8(int8_t* p, I a) {
    const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(h, h));
  }
  static void store_bf16(uint16_t* p, F a) {
    const I x = as_int(a);
    const I odd = iand(shr(x, 16), iset(1));
    const I r = shr(iadd(iadd(x, odd), iset(0x7fff)), 16);
    const __m128i h =
        _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
  }
  static F dot_bf16(F acc, I a, I b) {
    const I high = iset(int32_t(0xffff0000));
    acc = fma(as_float(shl(a, 16)), as_float(shl(b, 16)), acc);
    return fma(as_float(iand(a, high)), as_float(iand(b, high)), acc);
  }
};

}  // namespace steppe::STEPPE_VARIANT
