// What the parts of the standalone test program share.
//
// It needs no Python and no framework, so that it runs under the sanitizers and under an emulator.
// Everything is random and of odd sizes; main.cpp prints the seed, and takes one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../core/kernels.h"
#include "../core/pack.h"

// Ends the program and says where when `x` does not hold.
#define CHECK(x)                                                             \
  do {                                                                       \
    if (!(x)) {                                                              \
      std::fprintf(stderr, "%s:%d: %s is not so\n", __FILE__, __LINE__, #x); \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

namespace steppe::testing {

extern std::mt19937 rng;

inline int between(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(rng);
}
inline float normal() { return std::normal_distribution<float>()(rng); }
inline std::vector<float> normals(size_t n) {
  std::vector<float> out(n);
  for (float& x : out) x = normal();
  return out;
}
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
inline float from_bf16(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Stored blocks of a type with finite scales; with `units`, all scales (of minima too) are 1.
std::vector<uint8_t> random_blocks(const SourceType& type, int n, int k, bool units = false);

void test_products(const Kernels& kern);
void test_rows(const Kernels& kern);
void test_attention(const Kernels& kern);
void test_sampling(const Kernels& kern);
void test_steps(const Kernels& kern);
void test_pool();
void test_packing();

}  // namespace steppe::testing
