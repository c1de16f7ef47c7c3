#include "variant.h"

#define STEPPE_STRING2(x) #x
#define STEPPE_STRING(x) STEPPE_STRING2(x)
#define STEPPE_JOIN2(a, b) a##b
#define STEPPE_JOIN(a, b) STEPPE_JOIN2(a, b)

namespace steppe {

#ifdef STEPPE_EXTENDS  // a variant that adds tile registers to another
const Kernels* STEPPE_JOIN(kernels_, STEPPE_EXTENDS)();
#endif

// Called only after `dispatch.cpp` has seen that the CPU can run this variant.
const Kernels* STEPPE_JOIN(kernels_, STEPPE_VARIANT)() {
  // Filled once, by whichever thread comes first.
  static const Kernels table = [] {
#ifdef STEPPE_EXTENDS
    Kernels k = *STEPPE_JOIN(kernels_, STEPPE_EXTENDS)();
    STEPPE_VARIANT::add_tile_products(k);
#else
    Kernels k{};
    STEPPE_VARIANT::add_int_tiles(k);
    STEPPE_VARIANT::add_float_tiles(k);
    STEPPE_VARIANT::add_row_kernels(k);
    STEPPE_VARIANT::add_weights(k);
    STEPPE_VARIANT::add_cache(k);
#endif
    STEPPE_VARIANT::add_attention(k);
    k.name = STEPPE_STRING(STEPPE_VARIANT);
    return k;
  }();
  return &table;
}

}  // namespace steppe
