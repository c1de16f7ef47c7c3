// Int8 activations times 4- to 8-bit weights, in tiles of AMX, for many rows at once.
//
// A tile of 16 rows times a group of 32 values of k is one tile product, whose 16 x 16 integers are
// exact. What is then done with them is what `gemm_int.cpp` does, operation by operation, so that a
// row's bits are those of the vectors and it does not matter which of the two computed it.
//
// Tiles and vectors hardly overlap on the Xeon where this was measured: a group costs its tile product
// and the store of its sums (31 cycles together) and then its float operations (24, or 32 with a
// minimum), where vectors alone take 64 more for the product. Formats with a scale for each 16 values
// would do all of it twice, and stay with the vectors.
#include "../core/kernels.h"
#include "gemm_formats.h"
#include "tiles.h"
#include "variant.h"
#include "vec.h"

#include <type_traits>

namespace steppe::STEPPE_VARIANT {
namespace {

constexpr int kTileRows = 16;
constexpr int kRows = 64;     // rows that share a column block's unpacked weights
constexpr int kUnits = 16;    // units of 64 k that are unpacked at once: what stays in the first cache
constexpr int kGroups = 2 * kUnits;
constexpr int kAhead = 3;     // groups between a tile product and the use of its sums
constexpr int kQuantBytes = kTileRows * kGroup;
constexpr int kScalesAt = kColumns * kGroup, kMinimaAt = kScalesAt + 64;
constexpr int kWeightBytes = kMinimaAt + 64;  // of an unpacked group

// Tiles 0 and 1 are sums, 4 and 5 activations, 6 and 7 weights; each pair in turn.
constexpr TileShapes kShapes = [] {
  TileShapes shapes;
  shapes.set(0, 2, kTileRows, 64);
  shapes.set(4, 6, kTileRows, kGroup);
  shapes.set(6, 8, kGroup / 4, 64);
  return shapes;
}();

struct alignas(64) Space {
  uint8_t quants[kRows / kTileRows][kGroups][kQuantBytes];
  uint8_t weights[kGroups][kWeightBytes];
  int32_t sums[4][kTileRows][kColumns];
  float totals[kMostBlocks][kRows][kColumns];
};

// A tile product in three steps, with pair `t` of the registers, whose numbers have to be literals.
template <int t>
inline __attribute__((always_inline)) void begin(const uint8_t* quants) {
  if constexpr (t == 0) {
    _tile_zero(0);
    _tile_loadd(4, quants, kGroup);
  } else {
    _tile_zero(1);
    _tile_loadd(5, quants, kGroup);
  }
}
template <int t, bool Signed>
inline __attribute__((always_inline)) void multiply(const uint8_t* weights) {
  if constexpr (t == 0) {
    _tile_loadd(6, weights, 64);
    if constexpr (Signed) _tile_dpbssd(0, 4, 6);
    else _tile_dpbsud(0, 4, 6);
  } else {
    _tile_loadd(7, weights, 64);
    if constexpr (Signed) _tile_dpbssd(1, 5, 7);
    else _tile_dpbsud(1, 5, 7);
  }
}
template <int t>
inline __attribute__((always_inline)) void finish(int32_t (*sums)[kColumns]) {
  if constexpr (t == 0) _tile_stored(0, sums, 64);
  else _tile_stored(1, sums, 64);
}

// A unit's weights as tiles take them. What stands for 0 is subtracted here and not from the sums:
// the same integers.
template <Format f, int g>
inline __attribute__((always_inline)) void unpack_group(const uint8_t* super, const uint8_t* unit,
                                                        int u, uint8_t* out) {
  constexpr int raise = unshifted(f) && g == 1 ? 4 : 0, zero = layout_of(f).zero << raise;
  I w[8];
  unpack<f, g>(unit, 0, w);
  STEPPE_UNROLL
  for (int j = 0; j < 8; j++) {
    if constexpr (zero != 0) w[j] = _mm512_sub_epi8(w[j], _mm512_set1_epi8(char(zero)));
    _mm512_store_si512(out + j * 64, w[j]);
  }
  F scale = scale_of<f>(super, unit, u, g, 0, 0);
  if constexpr (raise != 0) scale = V::mul(scale, V::set(0.0625f));
  _mm512_store_ps(out + kScalesAt, scale);
  if constexpr (has_min(f)) _mm512_store_ps(out + kMinimaAt, min_of<f>(super, unit, u, g, 0, 0));
}

template <Format f>
void unpack_units(const uint8_t* w, int first, int units, Space& s) {
  constexpr Layout L = layout_of(f);
  constexpr int per = L.block_k / 64;
  for (int i = 0; i < units; i++) {
    const int at = first + i, u = at % per;
    const uint8_t* super = w + size_t(at / per) * L.block_bytes;
    const uint8_t* unit = super + L.header + u * L.unit;
    unpack_group<f, 0>(super, unit, u, s.weights[2 * i]);
    unpack_group<f, 1>(super, unit, u, s.weights[2 * i + 1]);
  }
}

// 16 rows times one column block over `groups` (even) groups: `R` rows of totals, which are loaded
// first if there are any. `low` and `high` are the rows' panels, from the first group on.
template <Format f, int R>
void row_tile(Space& s, const uint8_t (*quants)[kQuantBytes], const uint8_t* low,
              const uint8_t* high, int groups, bool begun, float (*totals)[kColumns],
              const uint8_t* next, size_t next_bytes) {
  constexpr bool kSigned = layout_of(f).zero != 0;
  F acc[R];
  STEPPE_UNROLL
  for (int r = 0; r < R; r++) acc[r] = begun ? V::loadf(totals[r]) : V::zero();
  begin<0>(quants[0]);
  multiply<0, kSigned>(s.weights[0]);
  finish<0>(s.sums[0]);
  begin<1>(quants[1]);
  multiply<1, kSigned>(s.weights[1]);
  finish<1>(s.sums[1]);
  if (groups > 2) {
    begin<0>(quants[2]);
    multiply<0, kSigned>(s.weights[2]);
  }
  // Group `at` in floats; meanwhile the sums of at + 2 leave tile `T`, and at + 3 begins in the other.
  auto step = [&](auto parity, int at) __attribute__((always_inline)) {
    constexpr int T = decltype(parity)::value, O = 1 - T;
    const bool starts = at + kAhead < groups, leaves = at + kAhead - 1 < groups;
    const uint8_t* w = s.weights[at];
    const int32_t(*sums)[kColumns] = s.sums[at % 4];
    const F scale = V::loadf(reinterpret_cast<const float*>(w + kScalesAt));
    F minimum = V::zero();
    if constexpr (has_min(f)) minimum = V::loadf(reinterpret_cast<const float*>(w + kMinimaAt));
    const size_t offset = size_t(at) * kPanelGroupBytes;
    STEPPE_UNROLL
    for (int r = 0; r < R; r++) {
      if (r == 0 && starts) begin<O>(quants[at + kAhead]);
      if (r == 4 && starts) multiply<O, kSigned>(s.weights[at + kAhead]);
      if (r == (R > 8 ? 10 : 6) && leaves) finish<T>(s.sums[(at + kAhead - 1) % 4]);
      const uint8_t* panel = (r < 8 ? low : high) + offset + r % 8 * 4;
      const F x = V::as_float(V::broadcast(panel + kPanelScales));
      acc[r] = V::fma(V::cvt(V::load(sums[r])), V::mul(scale, x), acc[r]);
      if constexpr (has_min(f))
        acc[r] = V::fma(V::as_float(V::broadcast(panel + kPanelSums)), minimum, acc[r]);
    }
  };
  for (int at = 0; at < groups; at += 2) {
    fetch(next, size_t(at / 2) * next_bytes, size_t(at / 2 + 1) * next_bytes);
    step(std::integral_constant<int, 0>(), at);
    step(std::integral_constant<int, 1>(), at + 1);
  }
  STEPPE_UNROLL
  for (int r = 0; r < R; r++) V::store(totals[r], acc[r]);
}

template <Format f>
void many(const ColumnBlock* blocks, int count, int supers, const uint8_t* panels,
          size_t panel_bytes, int rows, size_t out_stride, size_t add_stride) {
  constexpr Layout L = layout_of(f);
  constexpr int per = L.block_k / 64;
  const Tiles tiles(kShapes);
  Space s;  // some 120 KB of the stack, not initialised
  const int units = supers * per;
  for (int row = 0; row < rows; row += kRows) {
    const int here = rows - row < kRows ? rows - row : kRows;
    for (int unit = 0; unit < units; unit += kUnits) {
      const int taken = units - unit < kUnits ? units - unit : kUnits, groups = 2 * taken;
      auto panel = [&](int r) {
        return panels + size_t((row + r) / kPanelRows) * panel_bytes +
               size_t(unit) * 2 * kPanelGroupBytes;
      };
      for (int r = 0; r < here; r += kPanelRows) {
        const uint8_t* from = panel(r);
        for (int g = 0; g < groups; g++)
          __builtin_memcpy(s.quants[r / kTileRows][g] + r % kTileRows * kGroup,
                           from + g * kPanelGroupBytes, kPanelRows * kGroup);
      }
      for (int b = 0; b < count; b++) {
        unpack_units<f>(blocks[b].w, unit, taken, s);
        written();
        const uint8_t* next = b + 1 < count ? blocks[b + 1].w + size_t(unit) * (L.block_bytes / per)
                                            : nullptr;
        for (int r = 0; r < here; r += kTileRows, next = nullptr) {
          auto tile = here - r > kPanelRows ? row_tile<f, 16> : row_tile<f, 8>;
          tile(s, s.quants[r / kTileRows], panel(r),
               here - r > kPanelRows ? panel(r + kPanelRows) : nullptr, groups, unit > 0,
               s.totals[b] + r, next, L.block_bytes / per);
        }
      }
    }
    for (int b = 0; b < count; b++) {
      const ColumnBlock& block = blocks[b];
      for (int r = 0; r < here; r++) {
        const F acc[1] = {V::loadf(s.totals[b][r])};
        store_tile<1>(acc, 0, block.out + size_t(row + r) * out_stride, out_stride, block.bias,
                      block.add ? block.add + size_t(row + r) * add_stride : nullptr, add_stride,
                      block.columns);
      }
    }
  }
}

}  // namespace

void add_tile_products(Kernels& k) {
  k.many[int(Format::Q4_0)] = many<Format::Q4_0>;
  k.many[int(Format::Q4_1)] = many<Format::Q4_1>;
  k.many[int(Format::IQ4_NL)] = many<Format::IQ4_NL>;
  k.many[int(Format::Q5_0)] = many<Format::Q5_0>;
  k.many[int(Format::Q5_1)] = many<Format::Q5_1>;
  k.many[int(Format::Q8_0)] = many<Format::Q8_0>;
  k.many[int(Format::Q4_K)] = many<Format::Q4_K>;
  k.many[int(Format::Q5_K)] = many<Format::Q5_K>;
  k.many[int(Format::IQ4_XS)] = many<Format::IQ4_XS>;
}

}  // namespace steppe::STEPPE_VARIANT
