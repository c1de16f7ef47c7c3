// Packed weights times packed activations, of every format, against sums in double precision.
#include <algorithm>
#include <string>

#include "support.h"

namespace steppe::testing {

std::vector<uint8_t> random_blocks(const SourceType& type, int n, int k, bool units) {
  std::vector<uint8_t> data(size_t(n) * size_t(k) / size_t(type.elements) * size_t(type.bytes));
  const Layout& L = layout_of(type.format);
  if (L.form != Form::Q8) {
    for (size_t i = 0; i < data.size(); i += size_t(type.bytes)) {
      const float x = normal();
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      const uint16_t half = std::string(type.name) == "F16" ? uint16_t(between(0, 0x3bff))
                                                            : uint16_t(bits >> 16);
      if (type.bytes == 4) std::memcpy(&data[i], &x, 4);
      else std::memcpy(&data[i], &half, 2);
    }
    return data;
  }
  for (uint8_t& b : data) b = uint8_t(between(0, 255));
  auto set_half = [&](size_t block, int at) {
    const uint16_t h = units ? uint16_t(0x3c00) : uint16_t(between(0, 0x2fff));
    std::memcpy(&data[block * size_t(type.bytes) + size_t(at)], &h, 2);
  };
  for (size_t b = 0; b < data.size() / size_t(type.bytes); b++) {
    switch (type.format) {
      case Format::Q6_K: set_half(b, 208); break;
      case Format::Q3_K: set_half(b, 108); break;
      case Format::Q2_K: set_half(b, 80); set_half(b, 82); break;
      case Format::Q4_1:
      case Format::Q5_1:
      case Format::Q4_K:
      case Format::Q5_K: set_half(b, 0); set_half(b, 2); break;
      default: set_half(b, 0);
    }
  }
  return data;
}

namespace {

struct Matrix {
  Weight w;
  std::vector<uint8_t> packed;
  std::vector<float> values;  // [n][k], as unpacked
};

Matrix matrix(const SourceType& type, const std::vector<uint8_t>& data, int n, int k,
              const int64_t* order) {
  const Layout& L = layout_of(type.format);
  Matrix m;
  m.w.format = type.format;
  m.w.n = n;
  m.w.k = k;
  m.w.blocks = (n + kColumns - 1) / kColumns;
  m.w.supers = (k + L.block_k - 1) / L.block_k;
  m.w.stride = size_t(m.w.supers) * size_t(L.block_bytes);
  m.packed.resize(size_t(m.w.blocks) * m.w.stride);
  for (int b = 0; b < m.w.blocks; b++)
    CHECK(pack_block(type, data.data(), n, k, order, b, m.packed.data() + size_t(b) * m.w.stride));
  m.w.data = m.packed.data();
  m.values.resize(size_t(n) * size_t(k));
  for (int r = 0; r < n; r++) unpack_row(m.w, r, m.values.data() + size_t(r) * size_t(k));
  return m;
}

std::vector<uint8_t> panels_of(const Kernels& kern, Form form, const float* x, int rows, int k) {
  const size_t bytes = panel_bytes(form, size_t(k));
  std::vector<uint8_t> panels(size_t((rows + 7) / 8) * bytes);
  for (int r = 0; r < rows; r += 8)
    kern.pack(form, x + size_t(r) * size_t(k), size_t(k), std::min(8, rows - r), 0, k, k,
              panels.data() + size_t(r / 8) * bytes, 0);
  return panels;
}

// What the product sees of the activations: their quants times scales, or their rounding.
std::vector<float> seen(const std::vector<uint8_t>& panels, Form form, const float* x, int rows,
                        int k) {
  std::vector<float> out(x, x + size_t(rows) * size_t(k));
  const size_t bytes = panel_bytes(form, size_t(k));
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < k; i++) {
      float& v = out[size_t(r) * size_t(k) + size_t(i)];
      if (form == Form::BF16) v = from_bf16(float_to_bf16(v));
      if (form != Form::Q8) continue;
      const uint8_t* group =
          panels.data() + size_t(r / 8) * bytes + size_t(i / kGroup) * kPanelGroupBytes;
      float scale;
      std::memcpy(&scale, group + kPanelScales + r % 8 * 4, 4);
      v = float(int8_t(group[r % 8 * 32 + i % 32])) * scale;
    }
  return out;
}

// [rows][n], through outputs whose rows are longer: what lies between them must stay untouched. With
// `many` by the kernel for many rows, whatever their number, and some column blocks at once.
std::vector<float> multiply(const Kernels& kern, const Matrix& m, const float* x, int rows,
                            const float* bias, const float* add, bool many = false) {
  const int n = m.w.n, k = m.w.k;
  const Form form = layout_of(m.w.format).form;
  const std::vector<uint8_t> panels = panels_of(kern, form, x, rows, k);
  const size_t bytes = panel_bytes(form, size_t(k)), stride = size_t(n) + 5;
  constexpr float kUntouched = -7e30f;
  std::vector<float> wide(size_t(rows) * stride, kUntouched);
  for (int b = 0; many && b < m.w.blocks;) {
    ColumnBlock blocks[kMostBlocks];
    const int taken = std::min(between(1, kMostBlocks), m.w.blocks - b);
    for (int i = 0; i < taken; i++, b++) {
      const int column = b * kColumns;
      blocks[i] = {m.w.data + size_t(b) * m.w.stride, wide.data() + column,
                   bias ? bias + column : nullptr, add ? add + column : nullptr,
                   std::min(kColumns, n - column)};
    }
    kern.many[int(m.w.format)](blocks, taken, m.w.supers, panels.data(), bytes, rows, stride,
                               size_t(n));
  }
  for (int r = 0; r < rows && !many; r += 8)
    for (int b = 0; b < m.w.blocks; b++)
      kern.tile[int(m.w.format)](
          m.w.data + size_t(b) * m.w.stride, m.w.supers, panels.data() + size_t(r / 8) * bytes,
          std::min(8, rows - r), wide.data() + size_t(r) * stride + b * kColumns, stride,
          bias ? bias + b * kColumns : nullptr,
          add ? add + size_t(r) * size_t(n) + b * kColumns : nullptr, size_t(n),
          std::min(kColumns, n - b * kColumns));
  std::vector<float> out;
  for (int r = 0; r < rows; r++) {
    const float* row = wide.data() + size_t(r) * stride;
    out.insert(out.end(), row, row + n);
    for (int c = n; c < n + 5; c++) CHECK(row[c] == kUntouched);
  }
  return out;
}

void test_order(const SourceType& type, const std::vector<uint8_t>& data, const Matrix& m) {
  std::vector<int64_t> order(size_t(m.w.n));
  for (size_t i = 0; i < order.size(); i++) order[i] = int64_t(i);
  std::shuffle(order.begin(), order.end(), rng);
  const Matrix moved = matrix(type, data, m.w.n, m.w.k, order.data());
  const size_t bytes = size_t(m.w.k) * sizeof(float);
  for (size_t r = 0; r < order.size(); r++)
    CHECK(std::memcmp(moved.values.data() + r * size_t(m.w.k),
                      m.values.data() + size_t(order[r]) * size_t(m.w.k), bytes) == 0);
}

// Integer weights and activations: every sum is an integer that a float holds, and must be exact.
void test_integers(const Kernels& kern, const SourceType& type) {
  const int n = between(1, 40), rows = between(1, 19);
  const int k = type.elements * between(1, type.elements == 32 ? 9 : 3);
  const Matrix m = matrix(type, random_blocks(type, n, k, true), n, k, nullptr);
  std::vector<float> x(size_t(rows) * size_t(k));
  // Each group holds a 127, so that all scales are 1.
  for (size_t i = 0; i < x.size(); i++) x[i] = i % size_t(k) % 32 ? float(between(-1, 1)) : 127.0f;
  const std::vector<float> out = multiply(kern, m, x.data(), rows, nullptr, nullptr);
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < n; c++) {
      int64_t sum = 0;
      for (int i = 0; i < k; i++)
        sum += int64_t(x[size_t(r) * size_t(k) + size_t(i)]) *
               int64_t(m.values[size_t(c) * size_t(k) + size_t(i)]);
      CHECK(out[size_t(r) * size_t(n) + size_t(c)] == float(sum));
    }
}

void test_format(const Kernels& kern, const SourceType& type) {
  const int n = between(1, 50), rows = between(1, 27);
  const int k = type.elements == 1 ? between(1, 200)
                                   : type.elements * between(1, type.elements == 32 ? 9 : 3);
  const std::vector<uint8_t> data = random_blocks(type, n, k);
  const Matrix m = matrix(type, data, n, k, nullptr);
  test_order(type, data, m);
  const std::vector<float> x = normals(size_t(rows) * size_t(k));
  const std::vector<float> bias = normals(size_t(n)), add = normals(size_t(rows) * size_t(n));
  const bool biased = between(0, 1), added = between(0, 1);
  const std::vector<float> out = multiply(kern, m, x.data(), rows, biased ? bias.data() : nullptr,
                                          added ? add.data() : nullptr);
  const Form form = layout_of(type.format).form;
  const std::vector<float> a =
      seen(panels_of(kern, form, x.data(), rows, k), form, x.data(), rows, k);
  double largest = 0.0;  // of the weights: minima are added in parts of about this size
  for (float v : m.values) largest = std::max(largest, std::fabs(double(v)));
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < n; c++) {
      double exact = biased ? bias[size_t(c)] : 0.0;
      if (added) exact += add[size_t(r) * size_t(n) + size_t(c)];
      double size = std::fabs(exact) + 4.0;
      for (int i = 0; i < k; i++) {
        const double v = a[size_t(r) * size_t(k) + size_t(i)];
        exact += v * m.values[size_t(c) * size_t(k) + size_t(i)];
        size += std::fabs(v) * largest * 4.0;
      }
      CHECK(std::fabs(out[size_t(r) * size_t(n) + size_t(c)] - exact) <= 2e-6 * size);
    }
  // A row has the same bits alone.
  const int row = between(0, rows - 1);
  const std::vector<float> alone =
      multiply(kern, m, x.data() + size_t(row) * size_t(k), 1, biased ? bias.data() : nullptr,
               added ? add.data() + size_t(row) * size_t(n) : nullptr);
  CHECK(std::memcmp(alone.data(), out.data() + size_t(row) * size_t(n), size_t(n) * 4) == 0);
}

// Several column blocks at once give the bits of one after the other, whichever they are, and write
// nowhere else.
void test_streams(const Kernels& kern, const SourceType& type) {
  const Streams& streams = kern.streams[int(type.format)];
  if (streams.rows == 0) return;
  CHECK(streams.rows <= kStreamRows && streams.count <= kStreams);
  const int n = between(1, 150), rows = between(1, streams.rows);
  const int k = type.elements * between(1, type.elements == 32 ? 40 : 5);
  const Matrix m = matrix(type, random_blocks(type, n, k), n, k, nullptr);
  const std::vector<float> x = normals(size_t(rows) * size_t(k));
  const std::vector<float> bias = normals(size_t(n)), add = normals(size_t(rows) * size_t(n));
  const float* biased = between(0, 1) ? bias.data() : nullptr;
  const float* added = between(0, 1) ? add.data() : nullptr;
  const std::vector<float> expected = multiply(kern, m, x.data(), rows, biased, added);
  const std::vector<uint8_t> panels = panels_of(kern, Form::Q8, x.data(), rows, k);
  constexpr float kUntouched = -7e30f;
  std::vector<float> out(expected.size(), kUntouched);
  std::vector<int> order(static_cast<size_t>(m.w.blocks));
  for (int b = 0; b < m.w.blocks; b++) order[size_t(b)] = b;
  std::shuffle(order.begin(), order.end(), rng);
  order.resize(size_t(std::min(between(1, streams.count), m.w.blocks)));
  std::vector<ColumnBlock> blocks;
  std::vector<bool> taken(size_t(m.w.blocks));
  for (int b : order) {
    const int column = b * kColumns;
    blocks.push_back({m.w.data + size_t(b) * m.w.stride, out.data() + column,
                      biased ? biased + column : nullptr, added ? added + column : nullptr,
                      std::min(kColumns, n - column)});
    taken[size_t(b)] = true;
  }
  streams.run(blocks.data(), int(blocks.size()), m.w.supers, panels.data(), rows, size_t(n),
              size_t(n));
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < n; c++) {
      const size_t at = size_t(r) * size_t(n) + size_t(c);
      const float wanted = taken[size_t(c / kColumns)] ? expected[at] : kUntouched;
      CHECK(std::memcmp(&out[at], &wanted, sizeof wanted) == 0);
    }
}

// The kernel for many rows gives the bits of the one for few.
void test_many(const Kernels& kern, const SourceType& type) {
  if (!kern.many[int(type.format)]) return;
  const int n = between(1, 300), rows = between(0, 1) ? between(1, 40) : between(41, 150);
  const int k = type.elements * between(1, type.elements == 32 ? 80 : 10);
  const Matrix m = matrix(type, random_blocks(type, n, k), n, k, nullptr);
  const std::vector<float> x = normals(size_t(rows) * size_t(k));
  const std::vector<float> bias = normals(size_t(n)), add = normals(size_t(rows) * size_t(n));
  const float* biased = between(0, 1) ? bias.data() : nullptr;
  const float* added = between(0, 1) ? add.data() : nullptr;
  CHECK(same_bits(multiply(kern, m, x.data(), rows, biased, added, true),
                  multiply(kern, m, x.data(), rows, biased, added)));
}

}  // namespace

void test_products(const Kernels& kern) {
  for (const char* name : {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K",
                           "Q3_K", "IQ4_NL", "IQ4_XS", "BF16", "F16", "F32"}) {
    const SourceType& type = *source_type(name);
    test_format(kern, type);
    if (layout_of(type.format).form == Form::Q8) test_integers(kern, type);
    test_streams(kern, type);
    test_many(kern, type);
  }
  CHECK(source_type("Q9_9") == nullptr);
  // A scale that is not finite is refused.
  const SourceType& type = *source_type("Q8_0");
  std::vector<uint8_t> data = random_blocks(type, 3, 64), out(1088);
  const uint16_t infinite = 0x7c00;
  std::memcpy(data.data() + 2 * 34, &infinite, 2);
  CHECK(!pack_block(type, data.data(), 3, 64, nullptr, 0, out.data()));
}

}  // namespace steppe::testing
