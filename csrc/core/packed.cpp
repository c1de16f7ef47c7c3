#include "packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "pack.h"
#include "program.h"
#include "quantize.h"

namespace steppe {

namespace {

constexpr int kLanes = 8;
constexpr uint64_t kPrime = 0x9e3779b97f4a7c15u;  // odd, so that multiplying by it loses nothing

uint64_t stir(uint64_t state, uint64_t word) {
  const uint64_t x = (state ^ word) * kPrime;
  return x << 29 | x >> 35;
}

}  // namespace

Weight weight_of(Format format, int n, int k) {
  const Layout& L = layout_of(format);
  Weight w;
  w.format = format;
  w.n = n;
  w.k = k;
  w.blocks = (n + kColumns - 1) / kColumns;
  w.supers = (k + L.block_k - 1) / L.block_k;
  w.stride = size_t(w.supers) * size_t(L.block_bytes);
  return w;
}

bool format_by_name(const std::string& name, Format* out) {
  for (int f = 0; f < int(Format::COUNT); f++)
    if (name == format_name(Format(f))) {
      *out = Format(f);
      return true;
    }
  return false;
}

const SourceType* quantize_target(const SourceType& source, const std::string& name, int k) {
  if (name.empty()) return nullptr;
  const SourceType* target = source_type(name);
  if (!target || (target->format != Format::Q8_0 && target->format != Format::Q4_1))
    throw std::invalid_argument("nothing is quantised to " + name);
  if (source.elements != 1)
    throw std::invalid_argument("weights of type " + std::string(source.name) +
                                " are quantised already");
  if (k % kGroup != 0) throw std::invalid_argument("a row is no whole number of groups of 32");
  return target;
}

bool pack_matrix(Pool& pool, const SourceType& source, const SourceType* target,
                 const uint8_t* data, const int64_t* order, const Weight& w, uint8_t* out) {
  struct Packing final : Pool::Job {
    const SourceType &source, *target;
    const uint8_t* data;
    const int64_t* order;
    const Weight& w;
    uint8_t* out;
    std::vector<float> values;    // of a thread's row
    std::vector<uint8_t> blocks;  // of a thread's column block, quantised
    size_t row_bytes = 0;
    std::atomic<bool> finite{true};
    Packing(const SourceType& s, const SourceType* t, const uint8_t* d, const int64_t* o,
            const Weight& weight, uint8_t* to, int threads)
        : source(s), target(t), data(d), order(o), w(weight), out(to) {
      if (!t) return;
      row_bytes = size_t(w.k / kGroup) * size_t(t->bytes);
      values.resize(size_t(threads) * size_t(w.k));
      blocks.resize(size_t(threads) * kColumns * row_bytes);
    }
    void run(int, int tile, int thread) override {
      for (int b = tile * 8; b < std::min(w.blocks, tile * 8 + 8); b++)
        if (!pack(b, thread)) finite.store(false, std::memory_order_relaxed);
    }
    bool pack(int b, int thread) {
      uint8_t* to = out + size_t(b) * w.stride;
      if (!target) return pack_block(source, data, w.n, w.k, order, b, to);
      float* row = values.data() + size_t(thread) * size_t(w.k);
      uint8_t* quantised = blocks.data() + size_t(thread) * kColumns * row_bytes;
      const int rows = std::min(kColumns, w.n - b * kColumns);
      for (int r = 0; r < rows; r++) {
        const int at = b * kColumns + r;
        read_floats(source, data, w.k, order ? order[at] : at, row);
        quantize_row(w.format, row, w.k, quantised + size_t(r) * row_bytes);
      }
      return pack_block(*target, quantised, rows, w.k, nullptr, 0, to);
    }
  } job(source, target, data, order, w, out, pool.threads());
  pool.run(job, {(w.blocks + 7) / 8});
  return job.finite.load();
}

uint64_t piece_checksum(const uint8_t* data, size_t bytes) {
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = uint64_t(i + 1) * kPrime;
  uint64_t words[kLanes];
  size_t at = 0;
  for (; at + sizeof words <= bytes; at += sizeof words) {
    std::memcpy(words, data + at, sizeof words);
    for (int i = 0; i < kLanes; i++) lanes[i] = stir(lanes[i], words[i]);
  }
  std::memset(words, 0, sizeof words);
  std::memcpy(words, data + at, bytes - at);
  uint64_t all = bytes;
  for (int i = 0; i < kLanes; i++) all = stir(all, stir(lanes[i], words[i]));
  return all;
}

uint64_t join_checksums(const uint64_t* pieces, size_t count, size_t bytes) {
  uint64_t all = bytes;
  for (size_t i = 0; i < count; i++) all = stir(all, pieces[i]);
  return all;
}

uint64_t checksum(const uint8_t* data, size_t bytes) {
  std::vector<uint64_t> pieces;
  for (size_t at = 0; at < bytes; at += kPieceBytes)
    pieces.push_back(piece_checksum(data + at, std::min(kPieceBytes, bytes - at)));
  return join_checksums(pieces.data(), pieces.size(), bytes);
}

int Program::add_packed(const std::string& format, const uint8_t* data, size_t bytes, int n, int k,
                        uint64_t expected) {
  Format known;
  if (!format_by_name(format, &known))
    throw std::invalid_argument("there is no packed format " + format);
  constexpr int kMost = 1 << 30;
  if (n <= 0 || k <= 0 || n > kMost || k > kMost)
    throw std::invalid_argument("a matrix has no such shape");
  Weight w = weight_of(known, n, k);
  if (bytes != bytes_of(w))
    throw std::invalid_argument("the data do not have the size of their format and shape");
  uint8_t* out = arena_.take(bytes);
  w.data = out;
  struct Copying final : Pool::Job {
    const uint8_t* from;
    uint8_t* to;
    size_t bytes;
    std::vector<uint64_t> pieces;
    Copying(const uint8_t* f, uint8_t* t, size_t b)
        : from(f), to(t), bytes(b), pieces((b + kPieceBytes - 1) / kPieceBytes) {}
    void run(int, int tile, int) override {
      const size_t start = size_t(tile) * kPieceBytes;
      const size_t end = std::min(bytes, start + kPieceBytes);
      std::memcpy(to + start, from + start, end - start);
      // Of the copy: what will be used is what has been checked.
      pieces[size_t(tile)] = piece_checksum(to + start, end - start);
    }
  } job(data, out, bytes);
  pool_.run(job, {int(job.pieces.size())});
  if (join_checksums(job.pieces.data(), job.pieces.size(), bytes) != expected)
    throw std::invalid_argument("the checksum is wrong");
  weights_.push_back(w);
  return int(weights_.size()) - 1;
}

}  // namespace steppe
