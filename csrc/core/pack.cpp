#include "pack.h"

#include <cmath>
#include <cstring>

namespace steppe {

namespace {

// One super block's worth of one column (64 or 256 values), decoded to what the layouts store.
struct Piece {
  uint8_t q[256];       // unsigned quants
  float x[64];          // floats, for BF16 and F32
  uint16_t d[2], m[2];  // fp16 scales and mins per group; [0] alone in two-level formats
  uint8_t scale[16], minimum[16];
};

uint16_t u16(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

bool finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

constexpr uint16_t kHalfOne = 0x3c00;

bool decode_32(Format f, const uint8_t* row, int k, int k0, uint8_t zero, int bytes, Piece& p) {
  for (int g = 0; g < 2; g++) {
    uint8_t* q = p.q + 32 * g;
    if (k0 + 32 * g >= k) {  // padding
      std::memset(q, zero, 32);
      p.d[g] = kHalfOne;
      p.m[g] = 0;
      continue;
    }
    const uint8_t* b = row + size_t(k0 / 32 + g) * size_t(bytes);
    p.d[g] = u16(b);
    p.m[g] = 0;
    if (!finite(p.d[g])) return false;
    b += 2;
    if (f == Format::Q4_1 || f == Format::Q5_1) {
      p.m[g] = u16(b);
      if (!finite(p.m[g])) return false;
      b += 2;
    }
    if (f == Format::Q8_0) {
      for (int i = 0; i < 32; i++) q[i] = b[i] ^ 0x80;
      continue;
    }
    uint32_t high = 0;
    if (f == Format::Q5_0 || f == Format::Q5_1) {
      std::memcpy(&high, b, 4);
      b += 4;
    }
    for (int i = 0; i < 16; i++) {
      q[i] = uint8_t((b[i] & 15) | (high >> i & 1) << 4);
      q[16 + i] = uint8_t(b[i] >> 4 | (high >> (16 + i) & 1) << 4);
    }
  }
  return true;
}

void six_bit_scales(const uint8_t* s, Piece& p) {
  for (int i = 0; i < 4; i++) {
    p.scale[i] = s[i] & 63;
    p.minimum[i] = s[4 + i] & 63;
    p.scale[4 + i] = uint8_t((s[8 + i] & 15) | s[i] >> 6 << 4);
    p.minimum[4 + i] = uint8_t(s[8 + i] >> 4 | s[4 + i] >> 6 << 4);
  }
}

bool decode_256(Format f, const uint8_t* b, Piece& p) {
  switch (f) {
    case Format::Q4_K:
    case Format::Q5_K: {
      p.d[0] = u16(b);
      p.m[0] = u16(b + 2);
      six_bit_scales(b + 4, p);
      const uint8_t* qh = b + 16;
      const uint8_t* qs = f == Format::Q4_K ? b + 16 : b + 48;
      for (int u = 0; u < 4; u++)
        for (int i = 0; i < 32; i++) {
          const int low = f == Format::Q5_K ? (qh[i] >> (2 * u) & 1) << 4 : 0;
          const int high = f == Format::Q5_K ? (qh[i] >> (2 * u + 1) & 1) << 4 : 0;
          p.q[64 * u + i] = uint8_t((qs[32 * u + i] & 15) | low);
          p.q[64 * u + 32 + i] = uint8_t(qs[32 * u + i] >> 4 | high);
        }
      break;
    }
    case Format::Q6_K: {
      const uint8_t *ql = b, *qh = b + 128;
      std::memcpy(p.scale, b + 192, 16);
      p.d[0] = u16(b + 208);
      p.m[0] = 0;
      for (int h = 0; h < 2; h++)
        for (int plane = 0; plane < 4; plane++)
          for (int i = 0; i < 32; i++)
            p.q[128 * h + 32 * plane + i] =
                uint8_t((ql[64 * h + 32 * (plane % 2) + i] >> (4 * (plane / 2)) & 15) |
                        (qh[32 * h + i] >> (2 * plane) & 3) << 4);
      break;
    }
    case Format::Q2_K: {
      for (int t = 0; t < 16; t++) {
        p.scale[t] = b[t] & 15;
        p.minimum[t] = b[t] >> 4;
      }
      const uint8_t* qs = b + 16;
      for (int h = 0; h < 2; h++)
        for (int plane = 0; plane < 4; plane++)
          for (int i = 0; i < 32; i++)
            p.q[128 * h + 32 * plane + i] = qs[32 * h + i] >> (2 * plane) & 3;
      p.d[0] = u16(b + 80);
      p.m[0] = u16(b + 82);
      break;
    }
    case Format::Q3_K: {
      const uint8_t *mask = b, *qs = b + 32, *s = b + 96;
      for (int t = 0; t < 16; t++) {
        const int low = s[t % 8] >> (4 * (t / 8)) & 15;
        const int high = s[8 + t % 4] >> (2 * (t / 4)) & 3;
        p.scale[t] = uint8_t(int8_t((low | high << 4) - 32));
      }
      for (int h = 0; h < 2; h++)
        for (int plane = 0; plane < 4; plane++)
          for (int i = 0; i < 32; i++)
            p.q[128 * h + 32 * plane + i] =
                uint8_t((qs[32 * h + i] >> (2 * plane) & 3) |
                        (mask[i] >> (4 * h + plane) & 1) << 2);
      p.d[0] = u16(b + 108);
      p.m[0] = 0;
      break;
    }
    case Format::IQ4_XS: {
      p.d[0] = u16(b);
      p.m[0] = 0;
      const uint16_t high = u16(b + 2);
      for (int g = 0; g < 8; g++) {
        const int low = b[4 + g / 2] >> (4 * (g % 2)) & 15;
        p.scale[g] = uint8_t(int8_t((low | (high >> (2 * g) & 3) << 4) - 32));
        for (int i = 0; i < 16; i++) {
          p.q[32 * g + i] = b[8 + 16 * g + i] & 15;
          p.q[32 * g + 16 + i] = b[8 + 16 * g + i] >> 4;
        }
      }
      break;
    }
    default: return false;
  }
  return finite(p.d[0]) && finite(p.m[0]);
}

void decode_float(Format, const char* name, const uint8_t* row, int k, int k0, Piece& p) {
  for (int i = 0; i < 64; i++) {
    float x = 0.0f;
    if (k0 + i < k) {
      const uint8_t* at = row + size_t(k0 + i) * (name[0] == 'F' && name[1] == '3' ? 4 : 2);
      if (std::strcmp(name, "F32") == 0) {
        std::memcpy(&x, at, 4);
      } else if (std::strcmp(name, "F16") == 0) {
        x = half_to_float(u16(at));
      } else {
        const uint32_t b = uint32_t(u16(at)) << 16;
        std::memcpy(&x, &b, 4);
      }
    }
    p.x[i] = x;
  }
}

// The quants of one unit (64 k) of column c into the unit's planes.
void write_unit(Format f, const uint8_t* q, int c, uint8_t* unit) {
  const bool bytes = f == Format::Q8_0;
  const bool pairs_only = f == Format::Q2_K || f == Format::Q3_K;
  if (bytes) {
    for (int i = 0; i < 16; i++) std::memcpy(unit + i * 64 + c * 4, q + 4 * i, 4);
    return;
  }
  uint8_t* plane = unit;
  if (!pairs_only) {
    for (int j = 0; j < 8; j++)
      for (int x = 0; x < 4; x++)
        plane[j * 64 + c * 4 + x] =
            uint8_t((q[4 * j + x] & 15) | (q[32 + 4 * j + x] & 15) << 4);
    plane += 512;
  }
  if (pairs_only || f == Format::Q6_K) {
    for (int i = 0; i < 16; i++)
      for (int x = 0; x < 4; x++) {
        const int two = f == Format::Q6_K ? q[4 * i + x] >> 4 : q[4 * i + x] & 3;
        plane[(i % 4) * 64 + c * 4 + x] |= uint8_t(two << (2 * (i / 4)));
      }
    plane += 256;
  }
  if (f == Format::Q5_0 || f == Format::Q5_1 || f == Format::Q5_K || f == Format::Q3_K) {
    const int bit = f == Format::Q3_K ? 2 : 4;
    for (int i = 0; i < 16; i++)
      for (int x = 0; x < 4; x++) {
        const int at = c * 4 + x;
        plane[i * 8 + at / 8] |= uint8_t((q[4 * i + x] >> bit & 1) << (at % 8));
      }
  }
}

void write_piece(Format f, const Piece& p, int c, uint8_t* super) {
  const Layout& L = layout_of(f);
  if (f == Format::F32) {
    for (int i = 0; i < 64; i++) std::memcpy(super + (i * 16 + c) * 4, &p.x[i], 4);
    return;
  }
  if (f == Format::BF16) {
    for (int i = 0; i < 64; i++) {
      const uint16_t h = float_to_bf16(p.x[i]);
      std::memcpy(super + ((i / 2) * 16 + c) * 4 + 2 * (i % 2), &h, 2);
    }
    return;
  }
  if (L.block_k == 64) {
    write_unit(f, p.q, c, super);
    const bool has_min = f == Format::Q4_1 || f == Format::Q5_1;
    uint8_t* scales = super + L.unit - (has_min ? 128 : 64);
    for (int g = 0; g < 2; g++) {
      std::memcpy(scales + g * 32 + c * 2, &p.d[g], 2);
      if (has_min) std::memcpy(scales + 64 + g * 32 + c * 2, &p.m[g], 2);
    }
    return;
  }
  std::memcpy(super + c * 2, &p.d[0], 2);
  switch (f) {
    case Format::Q4_K:
    case Format::Q5_K:
      std::memcpy(super + 32 + c * 2, &p.m[0], 2);
      for (int g = 0; g < 8; g++) {
        super[64 + g * 16 + c] = p.scale[g];
        super[192 + g * 16 + c] = p.minimum[g];
      }
      break;
    case Format::Q2_K:
      std::memcpy(super + 32 + c * 2, &p.m[0], 2);
      for (int t = 0; t < 16; t++)
        super[64 + t * 16 + c] = uint8_t(p.scale[t] | p.minimum[t] << 4);
      break;
    case Format::IQ4_XS:
      for (int g = 0; g < 8; g++) super[32 + g * 16 + c] = p.scale[g];
      break;
    default:
      for (int t = 0; t < 16; t++) super[32 + t * 16 + c] = p.scale[t];
  }
  for (int u = 0; u < 4; u++) write_unit(f, p.q + 64 * u, c, super + L.header + u * L.unit);
}

// The quant at k = 64 unit + i of column c, read back from its planes.
int read_quant(Format f, const uint8_t* unit, int c, int i) {
  const int reg = i / 4, x = i % 4, g = i / 32, j = reg % 8, at = c * 4 + x;
  if (f == Format::Q8_0) return unit[reg * 64 + at];
  int q = 0;
  const uint8_t* plane = unit;
  const bool pairs_only = f == Format::Q2_K || f == Format::Q3_K;
  if (!pairs_only) {
    q = plane[j * 64 + at] >> (4 * g) & 15;
    plane += 512;
  }
  if (pairs_only || f == Format::Q6_K) {
    const int two = plane[(reg % 4) * 64 + at] >> (2 * (reg / 4)) & 3;
    q |= pairs_only ? two : two << 4;
    plane += 256;
  }
  if (f == Format::Q5_0 || f == Format::Q5_1 || f == Format::Q5_K || f == Format::Q3_K)
    q |= (plane[reg * 8 + at / 8] >> (at % 8) & 1) << (f == Format::Q3_K ? 2 : 4);
  return q;
}

}  // namespace

float half_to_float(uint16_t h) {
  const uint32_t rest = h & 0x7fff;
  uint32_t bits = rest >= 0x7c00 ? 0x7f800000u | (rest & 0x3ff) << 13 : rest << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  if (rest < 0x7c00) x *= 0x1p112f;
  return h & 0x8000 ? -x : x;
}

uint16_t float_to_bf16(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  if (std::isnan(x)) return uint16_t(b >> 16 | 0x40);
  return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

const SourceType* source_type(const std::string& name) {
  static const SourceType types[] = {
      {"Q4_0", Format::Q4_0, 32, 18},     {"Q4_1", Format::Q4_1, 32, 20},
      {"IQ4_NL", Format::IQ4_NL, 32, 18}, {"Q5_0", Format::Q5_0, 32, 22},
      {"Q5_1", Format::Q5_1, 32, 24},     {"Q8_0", Format::Q8_0, 32, 34},
      {"Q4_K", Format::Q4_K, 256, 144},   {"Q5_K", Format::Q5_K, 256, 176},
      {"Q6_K", Format::Q6_K, 256, 210},   {"IQ4_XS", Format::IQ4_XS, 256, 136},
      {"Q2_K", Format::Q2_K, 256, 84},    {"Q3_K", Format::Q3_K, 256, 110},
      {"BF16", Format::BF16, 1, 2},       {"F16", Format::BF16, 1, 2},
      {"F32", Format::F32, 1, 4},
  };
  for (const SourceType& t : types)
    if (name == t.name) return &t;
  return nullptr;
}

const char* format_name(Format f) {
  static const char* names[] = {"Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0", "Q4_K",
                                "Q5_K", "Q6_K", "IQ4_XS", "Q2_K", "Q3_K", "BF16", "F32"};
  return names[int(f)];
}

bool pack_block(const SourceType& type, const uint8_t* data, int n, int k, const int64_t* order,
                int block, uint8_t* out) {
  const Layout& L = layout_of(type.format);
  const size_t row_bytes = size_t(k) / size_t(type.elements) * size_t(type.bytes);
  const int supers = (k + L.block_k - 1) / L.block_k;
  std::memset(out, 0, size_t(supers) * size_t(L.block_bytes));
  Piece p{};
  for (int c = 0; c < kColumns; c++) {
    const int row = block * kColumns + c;
    if (row >= n) continue;  // padding columns: all zero bits, and never stored from
    const uint8_t* src = data + size_t(order ? order[row] : row) * row_bytes;
    for (int s = 0; s < supers; s++) {
      if (L.form != Form::Q8) {
        decode_float(type.format, type.name, src, k, s * 64, p);
      } else if (L.block_k == 64) {
        if (!decode_32(type.format, src, k, s * 64, uint8_t(L.zero), type.bytes, p)) return false;
      } else {
        if (!decode_256(type.format, src + size_t(s) * size_t(type.bytes), p)) return false;
      }
      write_piece(type.format, p, c, out + size_t(s) * size_t(L.block_bytes));
    }
  }
  return true;
}

void read_floats(const SourceType& type, const uint8_t* data, int k, int64_t row, float* out) {
  const uint8_t* from = data + size_t(row) * size_t(k) * size_t(type.bytes);
  Piece p;
  for (int k0 = 0; k0 < k; k0 += 64) {
    decode_float(type.format, type.name, from, k, k0, p);
    std::memcpy(out + k0, p.x, size_t(k - k0 < 64 ? k - k0 : 64) * sizeof(float));
  }
}

void unpack_row(const Weight& w, int row, float* out) {
  const Layout& L = layout_of(w.format);
  const int c = row % kColumns;
  const uint8_t* block = w.data + size_t(row / kColumns) * w.stride;
  for (int k = 0; k < w.k; k++) {
    const int s = k / L.block_k, in = k % L.block_k, u = in / 64, i = in % 64;
    const uint8_t* super = block + size_t(s) * size_t(L.block_bytes);
    if (w.format == Format::F32) {
      std::memcpy(out + k, super + (i * 16 + c) * 4, 4);
      continue;
    }
    if (w.format == Format::BF16) {
      const uint32_t b = uint32_t(u16(super + ((i / 2) * 16 + c) * 4 + 2 * (i % 2))) << 16;
      std::memcpy(out + k, &b, 4);
      continue;
    }
    const uint8_t* unit = super + L.header + u * L.unit;
    int q = read_quant(w.format, unit, c, i);
    if (w.format == Format::IQ4_NL || w.format == Format::IQ4_XS) q = kLevels[q] + L.zero;
    float scale, minimum = 0.0f;
    if (L.block_k == 64) {
      const bool has_min = w.format == Format::Q4_1 || w.format == Format::Q5_1;
      const uint8_t* scales = unit + L.unit - (has_min ? 128 : 64) + (i / 32) * 32 + c * 2;
      scale = half_to_float(u16(scales));
      if (has_min) minimum = half_to_float(u16(scales + 64));
    } else {
      const float d = half_to_float(u16(super + c * 2));
      const int group = in / 32, sixteen = in / 16;
      if (w.format == Format::Q4_K || w.format == Format::Q5_K) {
        scale = d * float(super[64 + group * 16 + c]);
        minimum = -(half_to_float(u16(super + 32 + c * 2)) * float(super[192 + group * 16 + c]));
      } else if (w.format == Format::Q2_K) {
        const int both = super[64 + sixteen * 16 + c];
        scale = d * float(both & 15);
        minimum = -(half_to_float(u16(super + 32 + c * 2)) * float(both >> 4));
      } else {
        const int at = w.format == Format::IQ4_XS ? group : sixteen;
        scale = d * float(int8_t(super[32 + at * 16 + c]));
      }
    }
    out[k] = scale * float(q - L.zero) + minimum;
  }
}

}  // namespace steppe
