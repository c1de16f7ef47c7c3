// Attention over pages of keys and values of every type, against a softmax in double precision over
// what the pages hold.
#include <algorithm>

#include "support.h"

namespace steppe::testing {

namespace {

// One layer's pages, read as core/kv.h says they lie.
struct Cache {
  KvType type;
  int kv_heads, dim;
  KvLayout layout;
  std::vector<uint8_t> bytes;

  Cache(KvType kind, int heads, int head_dim, int pages)
      : type(kind), kv_heads(heads), dim(head_dim), layout(kv_layout(kind, head_dim)),
        bytes(size_t(pages) * page_bytes(), 0xff) {}  // what is not written is not finite
  size_t page_bytes() const { return size_t(kv_heads) * layout.head_bytes; }
  uint8_t* head(int page, int h) {
    return bytes.data() + size_t(page) * page_bytes() + size_t(h) * layout.head_bytes;
  }
  double kept(const uint8_t* base, int place, int bias, const uint8_t* scales, int token) const {
    if (type == KvType::INT8) {
      float scale;
      std::memcpy(&scale, scales + token * 4, 4);
      return double(scale) * (bias ? int(base[place]) - bias : int(int8_t(base[place])));
    }
    uint16_t h;
    std::memcpy(&h, base + place * 2, 2);
    if (type == KvType::BF16) return from_bf16(h);
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double m = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return h & 0x8000 ? -m : m;
  }
  double key(int page, int h, int token, int i) {
    const uint8_t* at = head(page, h);
    return kept(at, (i / layout.pack * 64 + token) * layout.pack + i % layout.pack, 128,
                at + layout.key_scales, token);
  }
  double value(int page, int h, int token, int i) {
    const uint8_t* at = head(page, h);
    return kept(at + layout.values,
                (token / layout.pack * layout.dims + i) * layout.pack + token % layout.pack, 0,
                at + layout.value_scales, token);
  }
};

// What a cache may differ by from what was written, relative to the row's largest.
double rounding(KvType type) {
  return type == KvType::BF16 ? 1.0 / 256 : type == KvType::F16 ? 1.0 / 2048 : 0.51 / 127;
}

void check_type(const Kernels& kern, KvType type) {
  const int kv_heads = between(1, 3), shared = between(1, 5);
  const int dim = between(1, between(0, 3) ? 80 : 260);
  const int length = between(1, 60), context = length + between(0, 300);
  const int window = between(0, 1) ? between(1, 150) : 0;
  const float softcap = between(0, 2) ? 0.0f : 5.0f, scale = 1.0f / std::sqrt(float(dim));
  const int blocks = (context + 63) / 64, heads = kv_heads * shared;
  Cache cache(type, kv_heads, dim, blocks);
  std::vector<int32_t> pages(static_cast<size_t>(blocks));
  for (int b = 0; b < blocks; b++) pages[size_t(b)] = b;
  std::shuffle(pages.begin(), pages.end(), rng);
  for (int t = 0; t < context; t++)
    for (int h = 0; h < kv_heads; h++) {
      const int page = pages[size_t(t / 64)];
      const std::vector<float> k = normals(size_t(dim)), v = normals(size_t(dim));
      kern.write_kv[int(type)](k.data(), v.data(), dim, cache.head(page, h), t % 64);
      double top[2] = {0.0, 0.0};
      for (int i = 0; i < dim; i++) {
        top[0] = std::max(top[0], std::fabs(double(k[size_t(i)])));
        top[1] = std::max(top[1], std::fabs(double(v[size_t(i)])));
      }
      for (int i = 0; i < dim; i++) {
        const double far = rounding(type);
        CHECK(std::fabs(cache.key(page, h, t % 64, i) - k[size_t(i)]) <= far * top[0]);
        CHECK(std::fabs(cache.value(page, h, t % 64, i) - v[size_t(i)]) <= far * top[1]);
      }
    }
  const std::vector<int32_t> held = pages;
  // Blocks that the window has left behind may have no page any more.
  const int oldest = context - length - window + 1;
  for (int b = 0; window > 0 && b < oldest / 64; b++) pages[size_t(b)] = -1;
  const std::vector<float> q = normals(size_t(length) * size_t(heads * dim));
  const size_t stride = size_t(heads * dim) + 7;
  std::vector<float> out(size_t(length) * stride), alone = out, parted = out;
  std::vector<float> scratch(attention_scratch(dim)), partials;

  auto run = [&](std::vector<float>& to, int token, int tokens, int head, int count, int part) {
    AttentionTile t{};
    t.q = q.data();
    t.out = to.data();
    t.q_stride = size_t(heads * dim);
    t.out_stride = stride;
    t.keys = {cache.bytes.data(), cache.page_bytes(), pages.data()};
    t.first_token = token;
    t.first_position = context - length + token;
    t.tokens = tokens;
    t.head = head;
    t.heads = count;
    t.kv_head = head / shared;
    t.head_dim = dim;
    t.window = window;
    t.scale = scale;
    t.softcap = softcap;
    const int first = first_block_of(t.first_position, window);
    const int end = end_block_of(t.first_position, tokens);
    t.first_block = first;
    t.end_block = end;
    if (part == 0) return kern.attention[int(type)](t, scratch.data());
    partials.resize(size_t((end - first) * tokens * count) * partial_floats(dim));
    t.partials = partials.data();
    for (int b = first; b < end; b += part) {
      t.first_block = b;
      t.end_block = std::min(b + part, end);
      kern.attention[int(type)](t, scratch.data());
    }
    kern.merge(t, scratch.data());
  };
  const int step = kAttentionRows / shared;
  for (int h = 0; h < heads; h += shared)
    for (int t = 0; t < length; t += step) {
      run(out, t, std::min(step, length - t), h, shared, 0);
      run(parted, t, std::min(step, length - t), h, shared, between(1, 2));
    }
  CHECK(same_bits(out, parted));
  // A row has the same bits when its tile holds nothing else.
  for (int h = 0; h < heads; h++)
    for (int t = 0; t < length; t++) run(alone, t, 1, h, 1, 0);
  CHECK(same_bits(out, alone));

  // Queries and weights: bfloat16's rounding, float's, or that of 15 and 14 bits.
  const double error = type == KvType::BF16 ? 0.02 : 1e-3;
  for (int t = 0; t < length; t++)
    for (int h = 0; h < heads; h++) {
      const int last = context - length + t;
      const int first = window > 0 ? std::max(0, last - window + 1) : 0;
      std::vector<double> p;
      double total = 0.0;
      for (int j = first; j <= last; j++) {
        double s = 0.0;
        for (int i = 0; i < dim; i++) {
          float x = q[(size_t(t) * size_t(heads) + size_t(h)) * size_t(dim) + size_t(i)];
          if (type == KvType::BF16) x = from_bf16(float_to_bf16(x));
          s += double(x) * cache.key(held[size_t(j / 64)], h / shared, j % 64, i);
        }
        s *= scale;
        if (softcap > 0.0f) s = softcap * std::tanh(s / softcap);
        p.push_back(std::exp(s));
        total += p.back();
      }
      // Weights of int8 are rounded to a part of the largest one, which may stand by a value of zero:
      // half a unit for each key, in all directions.
      double peak = 0.0;
      for (int j = first; j <= last && type == KvType::INT8; j++) {
        double tallest = 0.0;
        for (int i = 0; i < dim; i++)
          tallest = std::max(
              tallest, std::fabs(double(cache.value(held[size_t(j / 64)], h / shared, j % 64, i))));
        peak += p[size_t(j - first)] / total * tallest;
      }
      const double rounding = 4.0 * std::sqrt(double(context)) * 0x1p-15 * peak;
      for (int i = 0; i < dim; i++) {
        double exact = 0.0, size = 0.0;
        for (int j = first; j <= last; j++) {
          const double x = p[size_t(j - first)] / total *
                           cache.value(held[size_t(j / 64)], h / shared, j % 64, i);
          exact += x;
          size += std::fabs(x);
        }
        const float got = out[size_t(t) * stride + size_t(h * dim + i)];
        CHECK(std::fabs(got - exact) <= error * size + rounding + 1e-5);
      }
    }
}

}  // namespace

void test_attention(const Kernels& kern) {
  for (KvType type : {KvType::BF16, KvType::F16, KvType::INT8}) check_type(kern, type);
}

}  // namespace steppe::testing
