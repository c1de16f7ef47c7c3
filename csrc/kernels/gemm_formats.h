// What is particular to a quantised format: the quants of a unit of weights as registers of bytes, the
// scales of its groups and their minima (layout.h).
#pragma once
#include "../core/kernels.h"
#include "vec.h"

namespace steppe::STEPPE_VARIANT {

using I = V::I;
using F = V::F;

constexpr bool has_bits(Format f) {
  return f == Format::Q5_0 || f == Format::Q5_1 || f == Format::Q5_K || f == Format::Q3_K;
}
constexpr bool has_pairs(Format f) {
  return f == Format::Q6_K || f == Format::Q2_K || f == Format::Q3_K;
}
constexpr bool has_nibbles(Format f) {
  return f != Format::Q8_0 && f != Format::Q2_K && f != Format::Q3_K;
}
constexpr bool has_levels(Format f) { return f == Format::IQ4_NL || f == Format::IQ4_XS; }
constexpr bool has_min(Format f) {
  return f == Format::Q4_1 || f == Format::Q5_1 || f == Format::Q4_K || f == Format::Q5_K ||
         f == Format::Q2_K;
}
constexpr bool by_sixteen(Format f) {
  return f == Format::Q6_K || f == Format::Q2_K || f == Format::Q3_K;
}
// Weights small enough for two products to fit 16 bits.
constexpr bool is_small(Format f) { return f != Format::Q8_0 && !has_levels(f); }
// How many registers of sums of two products, with activations up to 127, fit 16 bits together.
constexpr int pairs_that_fit(Format f) {
  return f == Format::Q6_K ? 2 : has_bits(f) && f != Format::Q3_K ? 4 : 8;
}
// High nibbles are used as 16 q with a sixteenth of the scale: no shift.
constexpr bool unshifted(Format f) {
  return V::kFullRange && has_nibbles(f) && !has_levels(f) && !has_bits(f) && !has_pairs(f);
}
constexpr int log2i(int x) {
  int n = 0;
  while (x > 1) {
    x >>= 1;
    n++;
  }
  return n;
}

constexpr uint8_t kLevelBytes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                     129, 141, 153, 166, 181, 197, 217, 241};

// Register j of the 8 of group g of a unit, columns [half * W, half * W + W).
template <Format f, int g>
inline __attribute__((always_inline)) I unpack(const uint8_t* unit, int half, int j) {
  const uint8_t* plane = unit + half * V::W * 4;
  const int i = g * 8 + j;
  I w = V::izero();
  if constexpr (f == Format::Q8_0) w = V::load(plane + i * 64);
  if constexpr (has_nibbles(f)) {
    const I nibble = V::iset(0x0f0f0f0f);
    const I x = V::load(plane + j * 64);
    if constexpr (g == 0) w = V::iand(x, nibble);
    else if constexpr (unshifted(f)) w = V::iand(x, V::iset(int32_t(0xf0f0f0f0)));
    else w = V::iand(V::shr(x, 4), nibble);
    if constexpr (has_levels(f)) w = V::lookup(w, kLevelBytes);
  }
  constexpr int nibble_bytes = has_nibbles(f) ? 512 : 0;
  constexpr int pair_bytes = has_pairs(f) ? 256 : 0;
  if constexpr (has_pairs(f)) {
    const I two = V::iset(f == Format::Q6_K ? 0x30303030 : 0x03030303);
    const int shift = 2 * (i / 4);
    const I x = V::load(plane + nibble_bytes + (i % 4) * 64);
    if constexpr (f == Format::Q6_K)
      w = V::ior(w, V::iand(shift < 4 ? V::shl(x, 4 - shift) : V::shr(x, shift - 4), two));
    else
      w = V::iand(V::shr(x, shift), two);
  }
  if constexpr (has_bits(f))
    w = V::ior(w, V::bits(unit + nibble_bytes + pair_bytes + i * 8, half,
                          f == Format::Q3_K ? 4 : 16));
  return w;
}

// All 8 of them.
template <Format f, int g>
inline __attribute__((always_inline)) void unpack(const uint8_t* unit, int half, I (&w)[8]) {
  STEPPE_UNROLL
  for (int j = 0; j < 8; j++) w[j] = unpack<f, g>(unit, half, j);
}

inline F halves(const uint8_t* p, int half) {
  return V::half_to_float(reinterpret_cast<const uint16_t*>(p + half * V::W * 2));
}

// Scale of group g (or of sixteen s of it) in unit u.
template <Format f>
inline F scale_of(const uint8_t* super, const uint8_t* unit, int u, int g, int s, int half) {
  constexpr Layout L = layout_of(f);
  if constexpr (L.block_k == 64) {
    constexpr int at = L.unit - (has_min(f) ? 128 : 64);
    return halves(unit + at + g * 32, half);
  } else {
    const F d = halves(super, half);
    const int column = half * V::W;
    if constexpr (f == Format::Q2_K) {
      const uint8_t* p = super + 64 + (u * 4 + g * 2 + s) * 16 + column;
      uint8_t low[16];
      for (int i = 0; i < V::W; i++) low[i] = p[i] & 15;
      return V::mul(d, V::u8_to_float(low));
    } else if constexpr (by_sixteen(f)) {
      const uint8_t* p = super + 32 + (u * 4 + g * 2 + s) * 16 + column;
      return V::mul(d, V::i8_to_float(reinterpret_cast<const int8_t*>(p)));
    } else if constexpr (f == Format::IQ4_XS) {
      const uint8_t* p = super + 32 + (u * 2 + g) * 16 + column;
      return V::mul(d, V::i8_to_float(reinterpret_cast<const int8_t*>(p)));
    } else {
      return V::mul(d, V::u8_to_float(super + 64 + (u * 2 + g) * 16 + column));
    }
  }
}

template <Format f>
inline F min_of(const uint8_t* super, const uint8_t* unit, int u, int g, int s, int half) {
  constexpr Layout L = layout_of(f);
  if constexpr (L.block_k == 64) {
    return halves(unit + L.unit - 64 + g * 32, half);
  } else {
    const F d = V::sub(V::zero(), halves(super + 32, half));
    const int column = half * V::W;
    if constexpr (f == Format::Q2_K) {
      const uint8_t* p = super + 64 + (u * 4 + g * 2 + s) * 16 + column;
      uint8_t high[16];
      for (int i = 0; i < V::W; i++) high[i] = p[i] >> 4;
      return V::mul(d, V::u8_to_float(high));
    } else {
      return V::mul(d, V::u8_to_float(super + 192 + (u * 2 + g) * 16 + column));
    }
  }
}

}  // namespace steppe::STEPPE_VARIANT
