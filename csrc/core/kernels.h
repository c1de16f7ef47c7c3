// The table of kernels of one instruction set variant. One such table exists per variant that the
// compiler could build; `dispatch.cpp` chooses one by asking the CPU.
//
// Every kernel computes a row (or an output element) in an order that depends on that row alone, so
// its bits are the same whatever the number of rows, tiles or threads.
#pragma once

#include "kv.h"

namespace steppe {

struct KeyBlocks {            // one layer's cache as attention reads it, for one sequence
  const uint8_t* base;        // the layer's pages
  size_t page_bytes;
  const int32_t* pages;       // page number of each 64 keys
};

// Attention takes keys in blocks of 128 that begin at multiples of 128. What a row gets from a block
// depends on the row and the block alone, and blocks are added up in rising order: so any cut of a
// tile's blocks into parts that `merge` puts together gives the bits of the whole.
constexpr int kBlockKeys = 128;

struct AttentionTile {
  const float* q;             // [tokens][q_stride], num_heads * head_dim of each
  float* out;                 // [tokens][out_stride]
  size_t q_stride, out_stride;
  KeyBlocks keys;
  int first_token;            // row in q and out of the tile's first query
  int first_position;         // its absolute position
  int tokens;                 // queries in the tile
  int head, heads;            // first query head and how many; all share `kv_head`
  int kv_head, head_dim;
  int window;                 // 0: none
  float scale, softcap;       // softcap 0: none
  int first_block, end_block; // blocks of keys to take, of those the tile sees
  float* partials;            // null: all blocks, to out. Else what each block gives, for `merge`
};

enum class Act : int { SILU, GELU_TANH };

constexpr int kMostBlocks = 16;
constexpr int kWeightBlock = 64;  // tokens of a row that are weighed, or looked at, together

struct ColumnBlock {          // 16 columns of a product, or the last ones of a matrix
  const uint8_t* w;
  float* out;                 // of the first row, as what follows
  const float* bias;          // may be null
  const float* add;           // may be null
  int columns;
};

constexpr int kStreams = 4;
constexpr int kStreamRows = 2;

// Products of up to `rows` <= kStreamRows rows with up to `count` <= kStreams column blocks that lie
// apart in memory, read side by side: the bits of `tile`. For as few rows the work is reading, and a
// processor that follows several streams has more reads under way than one that follows one.
struct Streams {
  int rows = 0, count = 1;
  void (*run)(const ColumnBlock* blocks, int count, int supers, const uint8_t* panel, int rows,
              size_t out_stride, size_t add_stride) = nullptr;
};

struct Kernels {
  const char* name;
  // out[r][0..15] = (panel rows r0..r0+rows) x column block (+ bias) (+ add[r][0..15]).
  void (*tile[int(Format::COUNT)])(const uint8_t* w, int supers, const uint8_t* panel, int rows,
                                   float* out, size_t out_stride, const float* bias,
                                   const float* add, size_t add_stride, int columns);
  // The same, and meanwhile fetches `next`, a column block of the same shape, into the cache: line by
  // line, since many lines asked for at once hold up the reads that the product waits for.
  void (*tile_ahead[int(Format::COUNT)])(const uint8_t* w, const uint8_t* next, int supers,
                                         const uint8_t* panel, int rows, float* out,
                                         size_t out_stride, const float* bias, const float* add,
                                         size_t add_stride, int columns);
  // The products of any number of rows, in panels `panel_bytes` apart, with up to kMostBlocks column
  // blocks: the bits of `tile`, faster from many rows on. Null where `tile` is all there is.
  void (*many[int(Format::COUNT)])(const ColumnBlock* blocks, int count, int supers,
                                   const uint8_t* panels, size_t panel_bytes, int rows,
                                   size_t out_stride, size_t add_stride);
  // For few rows, where there is a faster way for them.
  Streams streams[int(Format::COUNT)];
  // Values [k0, k1) of rows of k floats into rows r0.. of a panel; x points at value k0. k0, and k1
  // if less than k, are multiples of 32. With k1 = k the padding up to a multiple of 64 is zeroed.
  void (*pack)(Form form, const float* x, size_t stride, int rows, int k0, int k1, int k,
               uint8_t* panel, int r0);
  void (*rms_norm)(const float* x, const float* weight, float* out, int width, int heads, float eps);
  void (*add)(const float* a, const float* b, float* out, int n);
  void (*gated)(Act act, const float* gate, const float* up, float* out, int n);
  void (*softcap)(const float* x, float* out, int n, float cap);
  // Rotates `heads` heads of x (halves, the first 2 * half dimensions); out may be x.
  void (*rope)(const float* x, const float* cosine, const float* sine, float* out, int heads,
               int head_dim, int half);
  // Writes a token's key and value into place `at` of a head block.
  void (*write_kv[int(KvType::COUNT)])(const float* key, const float* value, int head_dim,
                                       uint8_t* head_block, int at);
  void (*attention[int(KvType::COUNT)])(const AttentionTile& tile, float* scratch);
  // The tile's output from the partials of all the blocks it sees. Scratch as for attention.
  void (*merge)(const AttentionTile& tile, float* scratch);
  // Index of the largest of n (the first of equals), and the value; -1 if one is a NaN.
  int (*argmax)(const float* x, int n, float* value);
  // sum of exp(x[i] - top) in a fixed order
  float (*sum_exp)(const float* x, int n, float top);
  // weights[i] = exp((x[i] - top) * scale), 0 where that is less than `least`; sums[b] = those of
  // block b of kWeightBlock, added up in a fixed order. No x is above top. Either may be null.
  void (*weigh)(const float* x, int n, double scale, double top, double least, double* sums,
                double* weights);
  // The largest of each kWeightBlock values; a NaN is none.
  void (*block_tops)(const float* x, int n, float* tops);
  double (*read)(const uint8_t* data, size_t bytes);  // bandwidth probe
};

// Null if there is none for so many rows.
inline const Streams* streams_of(const Kernels& k, Format f, int rows) {
  const Streams& s = k.streams[int(f)];
  return rows > s.rows ? nullptr : &s;
}

// Fewest rows for which `many` is the faster one.
constexpr int kManyRows = 16;
inline auto many_of(const Kernels& k, Format f, int rows) {
  return rows < kManyRows ? nullptr : k.many[int(f)];
}

constexpr int kAttentionRows = 48;   // query rows (tokens x heads) of an attention tile
constexpr int kAttentionGroup = 16;  // most of them that are computed together
// Floats of a row of partials: the sums of a block, its largest score and its sum of weights.
constexpr size_t partial_floats(int head_dim) { return round_up(size_t(head_dim), 16) + 16; }
// Floats of scratch that `attention` needs.
constexpr size_t attention_scratch(int head_dim) {
  const size_t dims = round_up(size_t(head_dim), 16);
  return size_t(kAttentionRows) * 2 * dims + size_t(kAttentionGroup) * (2 * kBlockKeys + dims) + 64;
}
// The blocks of keys that a tile of queries sees: [first, end).
constexpr int first_block_of(int first_position, int window) {
  return window > 0 && first_position >= window ? (first_position - window + 1) / kBlockKeys : 0;
}
constexpr int end_block_of(int first_position, int tokens) {
  return (first_position + tokens - 1) / kBlockKeys + 1;
}

const Kernels* kernels_by_name(const char* name);  // nullptr if not built or not runnable here
const Kernels* best_kernels();
// Names, best first, of at most `capacity` variants: those this CPU runs, and all that were built.
int runnable_variants(const char** names, int capacity);
int built_variants(const char** names, int capacity);

}  // namespace steppe
