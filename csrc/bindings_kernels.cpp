// Single kernels and the machine's state on numpy arrays, for tests and benchmarks.
#include "bindings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>

#include "core/pack.h"
#include "core/packed.h"
#include "core/program.h"

namespace steppe::bindings {
namespace {

struct Packed {
  Arena arena;
  Weight w;
};

Packed pack_weight(const std::string& type, In<uint8_t, 1> data, int n, int k,
                   std::optional<In<int64_t, 1>> order) {
  const SourceType* source = source_type(type);
  demand(source != nullptr, "unknown type");
  demand(n > 0 && k > 0 && k % source->elements == 0 &&
             data.size() == size_t(n) * size_t(k) / size_t(source->elements) * size_t(source->bytes),
         "data do not fit the shape");
  if (order) {
    demand(order->size() == size_t(n), "row_order has another length");
    for (size_t i = 0; i < order->size(); i++)
      demand(order->data()[i] >= 0 && order->data()[i] < n, "row_order outside the rows");
  }
  Packed p;
  p.w = weight_of(source->format, n, k);
  uint8_t* out = p.arena.take(bytes_of(p.w));
  p.w.data = out;
  for (int b = 0; b < p.w.blocks; b++)
    demand(pack_block(*source, data.data(), n, k, order ? order->data() : nullptr, b,
                              out + size_t(b) * p.w.stride),
           "a scale is not a finite number");
  return p;
}

Numpy<float> unpacked(const std::string& type, In<uint8_t, 1> data, int n, int k,
                      std::optional<In<int64_t, 1>> order) {
  const Packed p = pack_weight(type, data, n, k, order);
  float* out;
  Numpy<float> result = array<float>({size_t(n), size_t(k)}, &out);
  for (int r = 0; r < n; r++) unpack_row(p.w, r, out + size_t(r) * size_t(k));
  return result;
}

std::vector<uint8_t> panels_of(const Kernels& k, Form form, In<float, 2> x) {
  const size_t rows = x.shape(0), width = x.shape(1);
  const size_t bytes = panel_bytes(form, width);
  std::vector<uint8_t> panels((rows + 7) / 8 * bytes);
  for (size_t r = 0; r < rows; r += 8)
    k.pack(form, x.data() + r * width, width, int(std::min<size_t>(8, rows - r)), 0, int(width),
           int(width), panels.data() + r / 8 * bytes, 0);
  return panels;
}

Numpy<float> linear(const std::string& isa, const std::string& type, In<uint8_t, 1> data, int n,
                    int k, In<float, 2> x, std::optional<In<float, 1>> bias,
                    std::optional<In<float, 2>> add, std::optional<In<int64_t, 1>> order) {
  const Kernels& kern = kernels(isa);
  demand(x.shape(1) == size_t(k), "x has another width");
  demand(!bias || bias->size() == size_t(n), "bias has another length");
  demand(!add || (add->shape(0) == x.shape(0) && add->shape(1) == size_t(n)), "add differs");
  const Packed p = pack_weight(type, data, n, k, order);
  const Form form = layout_of(p.w.format).form;
  const std::vector<uint8_t> panels = panels_of(kern, form, x);
  const size_t bytes = panel_bytes(form, size_t(k)), rows = x.shape(0);
  float* out;
  Numpy<float> result = array<float>({rows, size_t(n)}, &out);
  auto block_at = [&](int b, size_t r) {
    const int column = b * kColumns;
    const size_t at = r * size_t(n) + size_t(column);
    return ColumnBlock{p.w.data + size_t(b) * p.w.stride, out + at,
                       bias ? bias->data() + column : nullptr, add ? add->data() + at : nullptr,
                       std::min(kColumns, n - column)};
  };
  // As a step does it: in one way or the other, by the number of rows.
  if (const auto many = many_of(kern, p.w.format, int(rows))) {
    for (int b = 0; b < p.w.blocks; b += kMostBlocks) {
      ColumnBlock blocks[kMostBlocks];
      const int taken = std::min(kMostBlocks, p.w.blocks - b);
      for (int i = 0; i < taken; i++) blocks[i] = block_at(b + i, 0);
      many(blocks, taken, p.w.supers, panels.data(), bytes, int(rows), size_t(n), size_t(n));
    }
    return result;
  }
  if (const steppe::Streams* streams = streams_of(kern, p.w.format, int(rows))) {
    const int length = (p.w.blocks + streams->count - 1) / streams->count;
    for (int b = 0; b < length; b++) {
      ColumnBlock blocks[kStreams];
      int count = 0;
      for (int i = b; i < p.w.blocks; i += length) blocks[count++] = block_at(i, 0);
      streams->run(blocks, count, p.w.supers, panels.data(), int(rows), size_t(n), size_t(n));
    }
    return result;
  }
  for (int b = 0; b < p.w.blocks; b++)
    for (size_t r = 0; r < rows; r += kPanelRows) {
      const ColumnBlock one = block_at(b, r);
      kern.tile[int(p.w.format)](one.w, p.w.supers, panels.data() + r / kPanelRows * bytes,
                                 int(std::min<size_t>(kPanelRows, rows - r)), one.out, size_t(n),
                                 one.bias, one.add, size_t(n), one.columns);
    }
  return result;
}

// One sequence in pages of its own: `keys` and `values` [context, kv_heads, dim] are written to
// `pages` of a cache whose every other byte is poison, and the queries [tokens, heads, dim] of its
// last tokens attend to them, in tiles of `tile_tokens`; `part_blocks` not 0: each in parts of that
// many blocks. Keys and values may be missing where `pages` is -1. Returns [tokens, heads, dim].
Numpy<float> attention(const std::string& isa, const std::string& dtype, In<float, 3> queries,
                       In<float, 3> keys, In<float, 3> values, In<int32_t, 1> pages, int window,
                       float scale, float softcap, int tile_tokens, int part_blocks) {
  const Kernels& kern = kernels(isa);
  const KvType type = kv_type(dtype);
  const int tokens = count(queries.shape(0)), heads = count(queries.shape(1));
  const int context = count(keys.shape(0)), kv_heads = count(keys.shape(1));
  const int dim = count(keys.shape(2));
  demand(tokens > 0 && tokens <= context && kv_heads > 0 && heads % kv_heads == 0 && dim > 0 &&
             dim <= kMaxHeadDim && queries.shape(2) == size_t(dim),
         "queries and keys do not fit");
  demand(values.shape(0) == keys.shape(0) && values.shape(1) == keys.shape(1) &&
             values.shape(2) == keys.shape(2),
         "keys and values differ in shape");
  const int shared = heads / kv_heads;
  demand(window >= 0 && tile_tokens > 0 && part_blocks >= 0 &&
             tile_tokens * shared <= kAttentionRows,
         "a tile has too many rows");
  demand((context + 63) / 64 <= count(pages.size()), "too few pages");
  const KvLayout layout = kv_layout(type, dim);
  const size_t page_bytes = layout.head_bytes * size_t(kv_heads);
  int highest = 0;
  for (size_t i = 0; i < pages.size(); i++) highest = std::max(highest, pages.data()[i]);
  Block cache((size_t(highest) + 1) * page_bytes);
  std::memset(cache.data(), 0xff, cache.size());  // a NaN in every type
  for (int i = 0; i < context; i++) {
    if (pages.data()[i / 64] < 0) continue;
    uint8_t* page = cache.data() + size_t(pages.data()[i / 64]) * page_bytes;
    for (int h = 0; h < kv_heads; h++) {
      const size_t at = (size_t(i) * size_t(kv_heads) + size_t(h)) * size_t(dim);
      kern.write_kv[int(type)](keys.data() + at, values.data() + at, dim,
                               page + size_t(h) * layout.head_bytes, i % 64);
    }
  }
  float* out;
  Numpy<float> result = array<float>({size_t(tokens), size_t(heads), size_t(dim)}, &out);
  std::vector<float> scratch(attention_scratch(dim)), partials;
  AttentionTile t{};
  t.q = queries.data();
  t.out = out;
  t.q_stride = t.out_stride = size_t(heads) * size_t(dim);
  t.keys = {cache.data(), page_bytes, pages.data()};
  t.heads = shared;
  t.head_dim = dim;
  t.window = window;
  t.scale = scale;
  t.softcap = softcap;
  for (int first = 0; first < tokens; first += tile_tokens)
    for (int h = 0; h < kv_heads; h++) {
      t.first_token = first;
      t.first_position = context - tokens + first;
      t.tokens = std::min(tile_tokens, tokens - first);
      t.head = h * shared;
      t.kv_head = h;
      const int begin = first_block_of(t.first_position, window);
      const int end = end_block_of(t.first_position, t.tokens);
      t.first_block = begin;
      t.end_block = end;
      t.partials = nullptr;
      if (part_blocks == 0) {
        kern.attention[int(type)](t, scratch.data());
        continue;
      }
      partials.assign(size_t(end - begin) * size_t(t.tokens * shared) * partial_floats(dim),
                      std::numeric_limits<float>::quiet_NaN());
      t.partials = partials.data();
      for (int block = begin; block < end; block += part_blocks) {
        t.first_block = block;
        t.end_block = std::min(block + part_blocks, end);
        kern.attention[int(type)](t, scratch.data());
      }
      kern.merge(t, scratch.data());
    }
  return result;
}

// Quants int8 [rows, k], float scales [rows, k / 32], float sums [rows, k / 32].
nb::tuple quantize(const std::string& isa, In<float, 2> x) {
  const Kernels& kern = kernels(isa);
  const size_t rows = x.shape(0), k = x.shape(1), groups = k / 32;
  demand(k % 32 == 0 && k > 0, "k is a multiple of 32");
  const std::vector<uint8_t> panels = panels_of(kern, Form::Q8, x);
  const size_t bytes = panel_bytes(Form::Q8, k);
  int8_t* q;
  float* scale;
  float* sums;
  Numpy<int8_t> quants = array<int8_t>({rows, k}, &q);
  Numpy<float> scales = array<float>({rows, groups}, &scale);
  Numpy<float> totals = array<float>({rows, groups}, &sums);
  for (size_t r = 0; r < rows; r++)
    for (size_t g = 0; g < groups; g++) {
      const uint8_t* group = panels.data() + r / 8 * bytes + g * kPanelGroupBytes;
      std::memcpy(q + r * k + g * 32, group + r % 8 * 32, 32);
      std::memcpy(scale + r * groups + g, group + kPanelScales + r % 8 * 4, 4);
      std::memcpy(sums + r * groups + g, group + kPanelSums + r % 8 * 4, 4);
    }
  return nb::make_tuple(quants, scales, totals);
}

std::vector<std::string> names_of(int (*list)(const char**, int)) {
  const char* names[16];
  const int n = list(names, 16);
  return std::vector<std::string>(names, names + n);
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one multiplication [m, k] x [n, k] of zeros and of a bare read of its packed weights, by
// turns, medians of `repeats`, on `threads`.
std::tuple<double, double> time_linear(const std::string& isa, const std::string& type, int m,
                                       int n, int k, int threads, int repeats) {
  const SourceType* source = source_type(type);
  demand(source && m > 0 && n > 0 && k > 0 && k % source->elements == 0, "no such matrix");
  Program program(kernels(isa), threads, n, 1);
  const std::vector<uint8_t> zeros(size_t(n) * size_t(k) / size_t(source->elements) *
                                   size_t(source->bytes));
  std::vector<double> times, reads;
  const int w = program.add_weight(type, zeros.data(), zeros.size(), n, k, nullptr);
  program.time_gemm(w, m, repeats, times, reads, seconds);
  std::sort(times.begin(), times.end());
  std::sort(reads.begin(), reads.end());
  return {times[times.size() / 2], reads[reads.size() / 2]};
}

// (seconds of an empty phase, bytes per second of a read) on a pool of that size.
std::tuple<double, double> probe(const std::string& isa, int threads, size_t bytes) {
  const Kernels& kern = kernels(isa);
  Pool pool(threads);
  struct Empty final : Pool::Job {
    void run(int, int, int) override {}
  } empty;
  const std::vector<int> phases(10000, pool.threads());
  pool.run(empty, phases);
  double start = seconds();
  pool.run(empty, phases);
  const double barrier = (seconds() - start) / double(phases.size());
  Block memory(bytes);
  std::memset(memory.data(), 1, bytes);
  constexpr size_t kTile = size_t(1) << 20;
  struct Read final : Pool::Job {
    const Kernels* k = nullptr;
    const uint8_t* data = nullptr;
    std::atomic<int> sink{0};
    void run(int, int tile, int) override {
      sink.fetch_add(int(k->read(data + size_t(tile) * kTile, kTile)), std::memory_order_relaxed);
    }
  } read;
  read.k = &kern;
  read.data = memory.data();
  double best = 0.0;
  for (int i = 0; i < 5; i++) {
    start = seconds();
    pool.run(read, {int(bytes / kTile)});
    best = std::max(best, double(bytes / kTile * kTile) / (seconds() - start));
  }
  return {barrier, best};
}

}  // namespace

void add_kernels(nb::module_& m) {
  m.def("variants", [] { return names_of(runnable_variants); });
  m.def("built_variants", [] { return names_of(built_variants); });
  m.def("default_threads", &default_threads);
  m.def("uniform", &uniform, "seed"_a, "sequence_index"_a, "position"_a, "purpose"_a);
  m.def("unpacked", &unpacked, "type"_a, "data"_a, "n"_a, "k"_a, "order"_a.none());
  m.def("linear", &linear, "isa"_a, "type"_a, "data"_a, "n"_a, "k"_a, "x"_a, "bias"_a.none(),
        "add"_a.none(), "order"_a.none());
  m.def("attention", &attention, "isa"_a, "kv_dtype"_a, "queries"_a, "keys"_a, "values"_a, "pages"_a,
        "window"_a, "scale"_a, "softcap"_a, "tile_tokens"_a, "part_blocks"_a);
  m.def("quantize", &quantize, "isa"_a, "x"_a);
  m.def("time_linear", &time_linear, "isa"_a, "type"_a, "m"_a, "n"_a, "k"_a, "threads"_a,
        "repeats"_a);
  m.def("probe", &probe, "isa"_a, "threads"_a, "bytes"_a);
}

}  // namespace steppe::bindings
