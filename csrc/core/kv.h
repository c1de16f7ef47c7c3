// How keys and values lie in a cache page of 64 tokens, for each type they are kept in.
//
// A page of a layer is one *head block* per key/value head, and a head block is
//
//   keys    [steps of the head's dimensions][64 keys][pack]
//   (INT8)  float scale of each of the 64 keys
//   values  [steps of 64 keys][dimensions, rounded up to 16][pack]
//   (INT8)  float scale of each of the 64 values
//
// where `pack` values are what one dot product instruction adds up in a lane: 2 bf16, 4 int8; f16 has
// no such instruction and stands alone. So one instruction serves a vector of keys, or of dimensions,
// with no sum across lanes. Dimensions that a head lacks to a whole step are zero.
//
// INT8 values are v = scale * q with q in [-127, 127] and one scale for each token of a head, its
// largest magnitude / 127. Keys are stored as q + 128 (the unsigned side of the dot product), values
// as q.
#pragma once

#include "layout.h"

namespace steppe {

enum class KvType : int { BF16, F16, INT8, COUNT };

constexpr int kKvPack[int(KvType::COUNT)] = {2, 1, 4};
constexpr int kKvBytes[int(KvType::COUNT)] = {2, 2, 1};
constexpr int kMaxHeadDim = 1024;  // sums of INT8 products then still fit 32 bits

struct KvLayout {
  int pack, bytes;         // values in a step, bytes of a value
  int dims;                // columns of the values
  size_t key_scales, values, value_scales;  // where they begin; scales only of INT8
  size_t head_bytes;       // of a head block
};

constexpr KvLayout kv_layout(KvType type, int head_dim) {
  KvLayout l{};
  l.pack = kKvPack[int(type)];
  l.bytes = kKvBytes[int(type)];
  l.dims = int(round_up(size_t(head_dim), 16));
  const size_t scales = type == KvType::INT8 ? kPageTokens * sizeof(float) : 0;
  l.key_scales = round_up(size_t(head_dim), size_t(l.pack)) * kPageTokens * size_t(l.bytes);
  l.values = l.key_scales + scales;
  l.value_scales = l.values + size_t(l.dims) * kPageTokens * size_t(l.bytes);
  l.head_bytes = l.value_scales + scales;
  return l;
}

}  // namespace steppe
