// Kernels that work along one row: norms, packing of activations, gates, rope, reductions.
#include "../core/kernels.h"
#include "variant.h"
#include "vec.h"

namespace steppe::STEPPE_VARIANT {
namespace {

using I = V::I;
using F = V::F;
constexpr int W = V::W;

inline int least(int a, int b) { return a < b ? a : b; }
inline float bits_to_float(uint32_t x) {
  float f;
  __builtin_memcpy(&f, &x, 4);
  return f;
}

// Groups whose largest magnitude is below this are zero: its reciprocal must stay finite.
constexpr float kLeast = 1e-30f;

// The scale of a group is its largest magnitude / 127, a float. A power of two could be added to the
// weight scale's exponent instead of multiplied in, which makes large products 8 % faster (measured);
// but its rounding error is 1.5 times this one's, and whole models show it: perplexity on 2,048 tokens
// rose by 0.94 % with it and by 0.33 % with this (SmolLM2-135M, against exact activations).
void pack_q8(const float* x, int k0, int k1, uint8_t* panel, int r) {
  for (int k = k0; k < k1; k += kGroup) {
    uint8_t* group = panel + size_t(k / kGroup) * kPanelGroupBytes;
    F v[32 / W];
    // Magnitudes compare as integers do, and so a NaN or an infinity is the largest of all: it makes
    // the scale, and with it everything computed from this group, not finite.
    I top = V::izero();
    const int n = k1 - k;
    for (int i = 0; i < 32 / W; i++) {
      const float* at = x + (k - k0) + i * W;
      v[i] = n - i * W >= W ? V::loadf(at) : V::loadf(at, n - i * W > 0 ? n - i * W : 0);
      top = V::imax(top, V::as_int(V::abs(v[i])));
    }
    const float largest = bits_to_float(uint32_t(V::hmax(top)));
    const F inverse = V::set(largest >= kLeast ? 127.0f / largest : 0.0f);
    const float scale = largest < kLeast ? 0.0f : largest * (1.0f / 127.0f);
    I sum[2] = {V::izero(), V::izero()};
    for (int i = 0; i < 32 / W; i++) {
      const F scaled = V::min(V::max(V::mul(v[i], inverse), V::set(-127.0f)), V::set(127.0f));
      const I q = V::cvt(scaled);
      V::store_i8(reinterpret_cast<int8_t*>(group + r * 32 + i * W), q);
      sum[i * W / 16] = V::iadd(sum[i * W / 16], q);
    }
    const int32_t first = V::hsum(sum[0]), second = V::hsum(sum[1]);
    const int32_t minus[2] = {-first, -second};
    const float total = float(first + second) * scale;
    __builtin_memcpy(group + kPanelScales + r * 4, &scale, 4);
    __builtin_memcpy(group + kPanelSums + r * 4, &total, 4);
    __builtin_memcpy(group + kPanelNegatives + r * 4, &minus[0], 4);
    __builtin_memcpy(group + kPanelNegatives + 32 + r * 4, &minus[1], 4);
  }
}

void pack_bf16(const float* x, int k0, int k1, uint8_t* panel, int r) {
  for (int k = k0; k < k1; k += W) {
    uint16_t h[W];
    V::store_bf16(h, V::loadf(x + (k - k0), least(k1 - k, W)));
    for (int i = 0; i < W; i += 2)
      __builtin_memcpy(panel + size_t((k + i) / 2 * kPanelRows + r) * 4, h + i, 4);
  }
}

void pack(Form form, const float* x, size_t stride, int rows, int k0, int k1, int k,
          uint8_t* panel, int r0) {
  const int padded = (k + 63) / 64 * 64;
  for (int i = 0; i < rows; i++, x += stride) {
    const int r = r0 + i;
    switch (form) {
      case Form::Q8:
        pack_q8(x, k0, k1, panel, r);
        if (k1 == k && (k + 31) / 32 % 2) {  // the padding group: zeros
          uint8_t* group = panel + size_t(padded / kGroup - 1) * kPanelGroupBytes;
          __builtin_memset(group + r * 32, 0, 32);
          for (int at = kPanelScales; at < kPanelGroupBytes; at += 32)
            __builtin_memset(group + at + r * 4, 0, 4);
        }
        break;
      case Form::BF16:
        pack_bf16(x, k0, k1, panel, r);
        if (k1 == k)
          for (int j = (k + W - 1) / W * W / 2; j < padded / 2; j++)
            __builtin_memset(panel + size_t(j * kPanelRows + r) * 4, 0, 4);
        break;
      case Form::F32:
        for (int j = k0; j < k1; j++)
          __builtin_memcpy(panel + size_t(j * kPanelRows + r) * 4, x + (j - k0), 4);
        if (k1 == k)
          for (int j = k; j < padded; j++)
            __builtin_memset(panel + size_t(j * kPanelRows + r) * 4, 0, 4);
        break;
    }
  }
}

void rms_norm(const float* x, const float* weight, float* out, int width, int heads, float eps) {
  const int n = width / heads;
  for (int h = 0; h < heads; h++, x += n, out += n) {
    F sum = V::zero();
    for (int i = 0; i < n; i += W) {
      const F v = V::loadf(x + i, n - i);
      sum = V::fma(v, v, sum);
    }
    const float mean = V::hsum(sum) / float(n);
    const F inverse = V::set(1.0f / __builtin_sqrtf(mean + eps));
    for (int i = 0; i < n; i += W) {
      const F v = V::mul(V::loadf(x + i, n - i), inverse);
      V::store(out + i, V::mul(v, V::loadf(weight + i, n - i)), n - i);
    }
  }
}

void add(const float* a, const float* b, float* out, int n) {
  for (int i = 0; i < n; i++) out[i] = a[i] + b[i];
}

void gated(Act act, const float* gate, const float* up, float* out, int n) {
  for (int i = 0; i < n; i += W) {
    const F g = V::loadf(gate + i, n - i);
    F u = g;
    if (act == Act::GELU_TANH) {
      // gelu(x) = x / (1 + exp(-2 t)), t = sqrt(2 / pi) (x + 0.044715 x^3)
      const F cube = V::mul(V::mul(g, g), g);
      u = V::mul(V::fma(V::set(0.044715f), cube, g), V::set(2.0f * 0.7978845608028654f));
    }
    const F e = exponential(V::sub(V::zero(), u));
    const F y = V::div(g, V::add(V::set(1.0f), e));
    V::store(out + i, V::mul(y, V::loadf(up + i, n - i)), n - i);
  }
}

void softcap(const float* x, float* out, int n, float cap) {
  const F inverse = V::set(1.0f / cap), c = V::set(cap);
  for (int i = 0; i < n; i += W)
    V::store(out + i, V::mul(c, hyperbolic_tangent(V::mul(V::loadf(x + i, n - i), inverse))),
             n - i);
}

void rope(const float* x, const float* cosine, const float* sine, float* out, int heads,
          int head_dim, int half) {
  for (int h = 0; h < heads; h++, x += head_dim, out += head_dim) {
    for (int i = 0; i < half; i += W) {
      const int n = least(half - i, W);
      const F c = V::loadf(cosine + i, n), s = V::loadf(sine + i, n);
      const F a = V::loadf(x + i, n), b = V::loadf(x + half + i, n);
      V::store(out + i, V::sub(V::mul(a, c), V::mul(b, s)), n);
      V::store(out + half + i, V::add(V::mul(b, c), V::mul(a, s)), n);
    }
    if (out != x)
      __builtin_memcpy(out + 2 * half, x + 2 * half, size_t(head_dim - 2 * half) * sizeof(float));
  }
}

int argmax(const float* x, int n, float* value) {
  // By chunks: the first one that holds the largest is then searched for its first place.
  constexpr int kChunk = 64 * W;
  float top = -__builtin_inff();
  int where = 0;
  I magnitude = V::izero();
  for (int c = 0; c < n; c += kChunk) {
    const int end = least(n, c + kChunk);
    F best = V::set(-__builtin_inff());
    for (int i = c; i < end; i += W) {
      const F v = V::keep(V::loadf(x + i, end - i), 0, end - i, V::set(-__builtin_inff()));
      best = V::max(best, v);
      magnitude = V::imax(magnitude, V::as_int(V::abs(v)));
    }
    const float m = V::hmax(best);
    if (m > top) {
      top = m;
      where = c;
    }
  }
  *value = top;
  if (V::hmax(magnitude) > 0x7f800000) return -1;  // a NaN, which comparisons do not show
  for (int i = where; i < n; i++)
    if (x[i] == top) return i;
  return -1;
}

float sum_exp(const float* x, int n, float top) {
  const F t = V::set(top);
  F sum[2] = {V::zero(), V::zero()};
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W)
    for (int j = 0; j < 2; j++)
      sum[j] = V::add(sum[j], exponential(V::sub(V::loadf(x + i + j * W), t)));
  for (; i < n; i += W) {
    const F e = exponential(V::sub(V::loadf(x + i, n - i), t));
    sum[0] = V::add(sum[0], V::keep(e, 0, n - i, V::zero()));
  }
  return V::hsum(V::add(sum[0], sum[1]));
}

double read(const uint8_t* data, size_t bytes) {
  I a = V::izero(), b = V::izero(), c = V::izero(), d = V::izero();
  constexpr size_t step = 4 * sizeof(I);
  for (size_t i = 0; i + step <= bytes; i += step) {
    a = V::ior(a, V::load(data + i));
    b = V::ior(b, V::load(data + i + sizeof(I)));
    c = V::ior(c, V::load(data + i + 2 * sizeof(I)));
    d = V::ior(d, V::load(data + i + 3 * sizeof(I)));
  }
  return double(V::hsum(V::ior(V::ior(a, b), V::ior(c, d))));
}

}  // namespace

void add_row_kernels(Kernels& k) {
  k.pack = pack;
  k.rms_norm = rms_norm;
  k.add = add;
  k.gated = gated;
  k.softcap = softcap;
  k.rope = rope;
  k.argmax = argmax;
  k.sum_exp = sum_exp;
  k.read = read;
}

}  // namespace steppe::STEPPE_VARIANT
