// How weights and activations lie in memory. Everything here is the same for every instruction set:
// a packed weight, once written, can be read by any variant.
//
// Weights: a *column block* is 16 output columns over all of K, stored as a run of *super blocks* of
// `block_k` (64 or 256) values of k. A super block is an optional header (two-level scales) and then
// one *unit* per 64 k. In a unit, "register (g, j)" is the 64 bytes [column 0..15][k = 32 g + 4 j + 0..3],
// which is what one 512-bit dot product instruction takes; narrower machines take a half at a time.
//
//   nibble plane  512 B  register j: low nibble of group 0, high nibble of group 1
//   bit plane     128 B  64 bits for each register (g, j): one more bit per value
//   pair plane    256 B  two more bits per value: register i = 8 g + j is in row i % 4, bits 2 (i / 4)
//   byte plane   1024 B  registers (g, j), one byte per value
//
// All quants are stored unsigned; `zero` is what stands for 0 and is subtracted through the sum of
// the activations, in integers.
//
// Activations: *panels* of 8 rows. Int8 panels hold, per group of 32 k, 384 bytes:
//   int8 [8 rows][32], float scale [8], float sum of the dequantised group [8],
//   int32 minus the sum of quants [2 halves][8].
#pragma once

#include <cstddef>
#include <cstdint>

namespace steppe {

enum class Format : int {
  Q4_0, Q4_1, IQ4_NL, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_XS, Q2_K, Q3_K, BF16, F32, COUNT
};

enum class Form : int { Q8, BF16, F32 };  // of activations in panels

struct Layout {
  int block_k;      // values of k in a super block
  int block_bytes;  // its bytes, for 16 columns
  int header;       // bytes before the first unit
  int unit;         // bytes of one 64-k unit
  int zero;         // the stored value that stands for 0
  Form form;        // what activations it multiplies
};

constexpr int kColumns = 16;
constexpr int kPanelRows = 8;
constexpr int kGroup = 32;
constexpr int kPanelGroupBytes = 384;
constexpr int kPanelScales = 256;
constexpr int kPanelSums = 288;
constexpr int kPanelNegatives = 320;
constexpr int kPageTokens = 64;

constexpr Layout kLayouts[int(Format::COUNT)] = {
    {64, 576, 0, 576, 8, Form::Q8},       // Q4_0: nibbles, fp16 scale [2][16]
    {64, 640, 0, 640, 0, Form::Q8},       // Q4_1: nibbles, scale, fp16 min [2][16]
    {64, 576, 0, 576, 128, Form::Q8},     // IQ4_NL: nibbles (indices of levels + 128), scale
    {64, 704, 0, 704, 16, Form::Q8},      // Q5_0: nibbles, bits, scale
    {64, 768, 0, 768, 0, Form::Q8},       // Q5_1: nibbles, bits, scale, min
    {64, 1088, 0, 1088, 128, Form::Q8},   // Q8_0: bytes, scale
    {256, 2368, 320, 512, 0, Form::Q8},   // Q4_K: d, dmin [16] fp16, scale, min u8 [8][16]; nibbles
    {256, 2880, 320, 640, 0, Form::Q8},   // Q5_K: same header; nibbles, bits
    {256, 3392, 320, 768, 32, Form::Q8},  // Q6_K: d [16], i8 scale [16 sixteens][16]; nibbles, pairs
    {256, 2240, 192, 512, 128, Form::Q8}, // IQ4_XS: d [16], i8 scale [8][16]; nibbles
    {256, 1344, 320, 256, 0, Form::Q8},   // Q2_K: d, dmin [16], scale | min << 4 [16][16]; pairs
    {256, 1856, 320, 384, 4, Form::Q8},   // Q3_K: d [16], i8 scale [16][16]; pairs, bits
    {64, 2048, 0, 2048, 0, Form::BF16},   // [k pair][16 columns][2]
    {64, 4096, 0, 4096, 0, Form::F32},    // [k][16 columns]
};

constexpr const Layout& layout_of(Format f) { return kLayouts[int(f)]; }

constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};

constexpr size_t round_up(size_t x, size_t to) { return (x + to - 1) / to * to; }

// Bytes of one 8-row panel of K values.
constexpr size_t panel_bytes(Form form, size_t k) {
  const size_t padded = round_up(k, 64);
  switch (form) {
    case Form::Q8: return padded / kGroup * kPanelGroupBytes;
    case Form::BF16: return padded * 2 * kPanelRows;
    case Form::F32: return padded * 4 * kPanelRows;
  }
  return 0;
}

// A packed matrix: `blocks` column blocks of `stride` bytes each.
struct Weight {
  Format format = Format::F32;
  int n = 0, k = 0;
  int blocks = 0;          // ceil(n / 16)
  int supers = 0;          // super blocks along k
  size_t stride = 0;       // bytes of a column block
  const uint8_t* data = nullptr;
};

}  // namespace steppe
