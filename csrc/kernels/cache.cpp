// Writing keys and values into cache pages: see core/kv.h for how they lie there.
#include "../core/kernels.h"
#include "variant.h"

namespace steppe::STEPPE_VARIANT {
namespace {

constexpr int W = V::W;
constexpr int kRoom = kMaxHeadDim + 16;
constexpr float kLeast = 1e-30f;  // rows whose magnitudes are below it are zero

void to_bf16(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; i += W) V::store_bf16(out + i, V::loadf(x + i, n - i));
}

void to_f16(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; i += W) V::store_half(out + i, V::loadf(x + i, n - i));
}

// Returns the scale.
float to_int8(const float* x, int n, int8_t* out) {
  // As integers, so that what is not finite is the largest, and makes the scale not finite.
  V::I top = V::izero();
  for (int i = 0; i < n; i += W) top = V::imax(top, V::as_int(V::abs(V::loadf(x + i, n - i))));
  const int32_t bits = V::hmax(top);
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  const V::F inverse = V::set(largest >= kLeast ? 127.0f / largest : 0.0f);
  const V::F limit = V::set(127.0f);
  for (int i = 0; i < n; i += W) {
    const V::F v = V::mul(V::loadf(x + i, n - i), inverse);
    V::store_i8(out + i, V::cvt(V::min(V::max(v, V::sub(V::zero(), limit)), limit)));
  }
  return largest < kLeast ? 0.0f : largest * (1.0f / 127.0f);
}

void write_bf16(const float* key, const float* value, int dim, uint8_t* head, int at) {
  const KvLayout l = kv_layout(KvType::BF16, dim);
  alignas(64) uint16_t t[kRoom];
  to_bf16(key, dim, t);  // what rounds the last pair up is zero
  for (int i = 0; i < dim; i += 2) __builtin_memcpy(head + (size_t(i) * 32 + size_t(at)) * 4, t + i, 4);
  to_bf16(value, dim, t);
  uint8_t* to = head + l.values + (size_t(at / 2) * size_t(l.dims) * 2 + size_t(at % 2)) * 2;
  for (int i = 0; i < dim; i++) __builtin_memcpy(to + size_t(i) * 4, t + i, 2);
}

void write_f16(const float* key, const float* value, int dim, uint8_t* head, int at) {
  const KvLayout l = kv_layout(KvType::F16, dim);
  alignas(64) uint16_t t[kRoom];
  to_f16(key, dim, t);
  for (int i = 0; i < dim; i++) __builtin_memcpy(head + size_t(i * 64 + at) * 2, t + i, 2);
  to_f16(value, dim, t);
  __builtin_memcpy(head + l.values + size_t(at) * size_t(l.dims) * 2, t, size_t(dim) * 2);
}

void write_int8(const float* key, const float* value, int dim, uint8_t* head, int at) {
  const KvLayout l = kv_layout(KvType::INT8, dim);
  alignas(64) int8_t t[kRoom];
  const float key_scale = to_int8(key, dim, t);
  for (int i = 0; i < dim; i += 4) {
    uint32_t quad;
    __builtin_memcpy(&quad, t + i, 4);
    quad ^= 0x80808080u;  // adds 128
    __builtin_memcpy(head + (size_t(i) * 16 + size_t(at)) * 4, &quad, 4);
  }
  __builtin_memcpy(head + l.key_scales + size_t(at) * 4, &key_scale, 4);
  const float value_scale = to_int8(value, dim, t);
  uint8_t* to = head + l.values + size_t(at / 4) * size_t(l.dims) * 4 + size_t(at % 4);
  for (int i = 0; i < dim; i++) to[size_t(i) * 4] = uint8_t(t[i]);
  __builtin_memcpy(head + l.value_scales + size_t(at) * 4, &value_scale, 4);
}

}  // namespace

void add_cache(Kernels& k) {
  k.write_kv[int(KvType::BF16)] = write_bf16;
  k.write_kv[int(KvType::F16)] = write_f16;
  k.write_kv[int(KvType::INT8)] = write_int8;
}

}  // namespace steppe::STEPPE_VARIANT
