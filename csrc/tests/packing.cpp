// Packed weights on their way out of and back into a program, and quantisation on the way in.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "../core/packed.h"
#include "../core/program.h"
#include "../core/quantize.h"
#include "support.h"

namespace steppe::testing {

namespace {

template <typename F>
bool refused(F f) {
  try {
    f();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_checksums() {
  const size_t bytes = size_t(between(1, 700000));
  std::vector<uint8_t> data(bytes);
  for (uint8_t& b : data) b = uint8_t(between(0, 255));
  const uint64_t sound = checksum(data.data(), bytes);
  for (int i = 0; i < 20; i++) {
    const size_t at = size_t(between(0, int(bytes) - 1));
    const uint8_t bit = uint8_t(1 << between(0, 7));
    data[at] ^= bit;
    CHECK(checksum(data.data(), bytes) != sound);
    data[at] ^= bit;
  }
  CHECK(checksum(data.data(), bytes) == sound);
  CHECK(checksum(data.data(), bytes - 1) != sound);
}

void test_return(const char* name) {
  const SourceType& type = *source_type(name);
  const int n = between(1, 70), k = 256 * between(1, 3);
  const std::vector<uint8_t> stored = random_blocks(type, n, k);
  const Weight w = weight_of(type.format, n, k);
  std::vector<uint8_t> packed(bytes_of(w));
  Pool pool(between(1, 3));
  CHECK(pack_matrix(pool, type, nullptr, stored.data(), nullptr, w, packed.data()));
  const uint64_t sum = checksum(packed.data(), packed.size());
  Program program(*best_kernels(), between(1, 3), n, 8);
  const char* format = format_name(type.format);
  const int first = program.add_weight(name, stored.data(), stored.size(), n, k, nullptr);
  const int second = program.add_packed(format, packed.data(), packed.size(), n, k, sum);
  std::vector<float> a(static_cast<size_t>(k)), b(a.size());
  for (int row = 0; row < n; row++) {
    program.embedding_row(first, row, a.data());
    program.embedding_row(second, row, b.data());
    CHECK(same_bits(a, b));
  }
  packed[size_t(between(0, int(packed.size()) - 1))] ^= 1;
  CHECK(refused([&] { program.add_packed(format, packed.data(), packed.size(), n, k, sum); }));
  CHECK(refused([&] { program.add_packed(format, packed.data(), 64, n, k, sum); }));
  CHECK(refused([&] { program.add_packed("Q9_9", packed.data(), packed.size(), n, k, sum); }));
}

void test_quantising(const char* target, double levels) {
  const int n = between(1, 40), k = 32 * between(1, 9);
  const std::vector<float> x = normals(size_t(n) * size_t(k));
  Program program(*best_kernels(), between(1, 3), n, 8);
  const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
  const int weight = program.add_weight("F32", bytes, x.size() * 4, n, k, nullptr, target);
  std::vector<float> row(static_cast<size_t>(k));
  for (int r = 0; r < n; r++) {
    program.embedding_row(weight, r, row.data());
    for (int g = 0; g < k; g += kGroup) {
      const float* from = x.data() + size_t(r) * size_t(k) + g;
      double most = 0.0, error = 0.0;
      for (int i = 0; i < kGroup; i++) {
        most = std::max(most, std::abs(double(from[i])));
        error += std::pow(double(row[size_t(g + i)]) - double(from[i]), 2);
      }
      CHECK(std::sqrt(error / kGroup) < most / levels);
    }
  }
  std::vector<float> bad = x;
  bad[size_t(between(0, int(x.size()) - 1))] = INFINITY;
  bytes = reinterpret_cast<const uint8_t*>(bad.data());
  CHECK(refused([&] { program.add_weight("F32", bytes, x.size() * 4, n, k, nullptr, target); }));
  CHECK(refused([&] { program.add_weight("F32", bytes, x.size() * 4, n, k, nullptr, "Q6_K"); }));
}

// Every half there is survives the way through float.
void test_halves() {
  for (int h = 0; h < 0x10000; h++) {
    const float x = half_to_float(uint16_t(h));
    if (!std::isnan(x)) CHECK(float_to_half(x) == h);
  }
  CHECK(float_to_half(65519.0f) == 0x7bff && float_to_half(65520.0f) == 0x7c00);
  CHECK(float_to_half(0x1p-25f) == 0 && float_to_half(-0x1.8p-25f) == 0x8001);
}

}  // namespace

void test_packing() {
  test_checksums();
  test_halves();
  for (const char* name : {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "F32"}) test_return(name);
  test_quantising("Q8_0", 200.0);
  test_quantising("Q4_1", 12.0);
}

}  // namespace steppe::testing
