// `steppe_tests [seed]`: the pool, and every variant of the kernels that this machine runs. Exits
// with 1 and says where when something is wrong.
#include "support.h"

namespace steppe::testing {
std::mt19937 rng;
}

int main(int argc, char** argv) {
  using namespace steppe;
  using namespace steppe::testing;
  const unsigned seed =
      argc > 1 ? unsigned(std::strtoul(argv[1], nullptr, 10)) : std::random_device{}();
  std::printf("seed %u\n", seed);
  std::fflush(stdout);
  rng.seed(seed);
  const char* names[16];
  const int count = runnable_variants(names, 16);
  CHECK(count > 0 && kernels_by_name(names[0]) == best_kernels());
  CHECK(kernels_by_name("mmx") == nullptr);
  test_pool();
  std::printf("pool: ok\n");
  test_packing();
  std::printf("packing: ok\n");
  for (int i = 0; i < count; i++) {
    const Kernels& kern = *kernels_by_name(names[i]);
    CHECK(std::strcmp(kern.name, names[i]) == 0);
    test_rows(kern);
    for (int repeat = 0; repeat < 2; repeat++) {
      test_products(kern);
      test_attention(kern);
    }
    test_sampling(kern);
    test_steps(kern);
    std::printf("%s: ok\n", names[i]);
    std::fflush(stdout);
  }
  return 0;
}
