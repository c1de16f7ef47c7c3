// NEON with the dot product instructions of Armv8.2: 4 lanes.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace steppe::STEPPE_VARIANT {

struct V {
  static constexpr int W = 4;
  static constexpr int kMaxRows = 8;
  static constexpr bool kFullRange = false;  // the signed product stops at 127
  static constexpr bool kPairs = false;
  using I = int32x4_t;
  using F = float32x4_t;

  static I izero() { return vdupq_n_s32(0); }
  static I iset(int32_t x) { return vdupq_n_s32(x); }
  static I load(const void* p) {
    return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
  }
  static I broadcast(const void* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return vdupq_n_s32(x);
  }
  static I iadd(I a, I b) { return vaddq_s32(a, b); }
  static I imax(I a, I b) { return vmaxq_s32(a, b); }
  static I iand(I a, I b) { return vandq_s32(a, b); }
  static I ior(I a, I b) { return vorrq_s32(a, b); }
  static I shl(I a, int n) { return vshlq_s32(a, vdupq_n_s32(n)); }
  static I shr(I a, int n) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vdupq_n_s32(-n)));
  }
  static I bits(const uint8_t* plane, int half, int value) {
    const uint8x16_t spread =
        vcombine_u8(vdup_n_u8(plane[2 * half]), vdup_n_u8(plane[2 * half + 1]));
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    return vreinterpretq_s32_u8(vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(uint8_t(value))));
  }
  static I lookup(I index, const uint8_t* table16) {
    return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table16), vreinterpretq_u8_s32(index)));
  }
  template <bool Small>
  static I dp(I acc, I w, I a) {
    const int8x16_t x = vreinterpretq_s8_s32(a);
    if constexpr (Small) {
      return vdotq_s32(acc, vreinterpretq_s8_s32(w), x);
    } else {
      // Both factors of this instruction are signed: w = (w - 128) + 128.
      const int8x16_t low = veorq_s8(vreinterpretq_s8_s32(w), vdupq_n_s8(-128));
      const I sum = vdotq_s32(izero(), vdupq_n_s8(1), x);
      return vaddq_s32(vdotq_s32(acc, low, x), vshlq_n_s32(sum, 7));
    }
  }

  static F zero() { return vdupq_n_f32(0.0f); }
  static F set(float x) { return vdupq_n_f32(x); }
  static F loadf(const float* p) { return vld1q_f32(p); }
  static F loadf(const float* p, int n) {
    if (n >= 4) return vld1q_f32(p);
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < n; i++) x[i] = p[i];
    return vld1q_f32(x);
  }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static void store(float* p, F x, int n) {
    if (n >= 4) return vst1q_f32(p, x);
    float part[4];
    vst1q_f32(part, x);
    for (int i = 0; i < n; i++) p[i] = part[i];
  }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  // As the other variants do it: the second one if either is a NaN.
  static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static F abs(F a) { return vabsq_f32(a); }
  static F round(F a) { return vrndnq_f32(a); }
  static F cvt(I a) { return vcvtq_f32_s32(a); }
  static I cvt(F a) { return vcvtnq_s32_f32(a); }
  static F as_float(I a) { return vreinterpretq_f32_s32(a); }
  static I as_int(F a) { return vreinterpretq_s32_f32(a); }
  static float hmax(F a) { return vmaxnmvq_f32(a); }
  static int32_t hmax(I a) { return vmaxvq_s32(a); }
  static float hsum(F a) {
    const float32x2_t x = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(x, 0) + vget_lane_f32(x, 1);
  }
  static int32_t hsum(I a) { return vaddvq_s32(a); }
  static F zero_below(F x, F limit, F y) {
    return as_float(vbicq_s32(as_int(y), vreinterpretq_s32_u32(vcltq_f32(x, limit))));
  }
  static F scaled(F x, F n) {
    const F y = as_float(iadd(as_int(x), shl(cvt(n), 23)));
    return zero_below(n, set(-126.0f), y);
  }
  static F keep(F x, int lo, int hi, F other) {
    static constexpr int32_t kLanes[4] = {0, 1, 2, 3};
    const I lane = vld1q_s32(kLanes);
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, iset(lo)), vcltq_s32(lane, iset(hi))), x, other);
  }
  static F half_to_float(const uint16_t* p) {
    uint64_t four;
    std::memcpy(&four, p, 8);
    return vcvt_f32_f16(vreinterpret_f16_u64(vdup_n_u64(four)));
  }
  static void store_half(uint16_t* p, F a) {
    const uint64_t four = vget_lane_u64(vreinterpret_u64_f16(vcvt_f16_f32(a)), 0);
    std::memcpy(p, &four, 8);
  }
  static F u8_to_float(const uint8_t* p) {
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes(p))))));
  }
  static F i8_to_float(const int8_t* p) {
    return cvt(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four_bytes(p))))));
  }
  static void store_i8(int8_t* p, I a) {
    const int16x4_t h = vqmovn_s32(a);
    const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(h, h))), 0);
    std::memcpy(p, &four, 4);
  }
  static void store_bf16(uint16_t* p, F a) {
    const uint32x4_t x = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
    vst1_u16(p, vshrn_n_u32(vaddq_u32(vaddq_u32(x, odd), vdupq_n_u32(0x7fff)), 16));
  }
  static F dot_bf16(F acc, I a, I b) {
    const I high = iset(int32_t(0xffff0000));
    acc = fma(as_float(shl(a, 16)), as_float(shl(b, 16)), acc);
    return fma(as_float(iand(a, high)), as_float(iand(b, high)), acc);
  }

 private:
  static uint32x2_t four_bytes(const void* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return vdup_n_u32(x);
  }
};

}  // namespace steppe::STEPPE_VARIANT
