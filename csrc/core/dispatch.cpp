// Which variants were built, which of them this CPU runs, and which one is best.
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstring>

#include "kernels.h"

namespace steppe {

#define STEPPE_DECLARE(v) const Kernels* kernels_##v();
#ifdef STEPPE_HAVE_avx512_amx
STEPPE_DECLARE(avx512_amx)
#endif
#ifdef STEPPE_HAVE_avx512_vnni
STEPPE_DECLARE(avx512_vnni)
#endif
#ifdef STEPPE_HAVE_avx512
STEPPE_DECLARE(avx512)
#endif
#ifdef STEPPE_HAVE_avx2_vnni
STEPPE_DECLARE(avx2_vnni)
#endif
#ifdef STEPPE_HAVE_avx2
STEPPE_DECLARE(avx2)
#endif
#ifdef STEPPE_HAVE_neon_dotprod
STEPPE_DECLARE(neon_dotprod)
#endif
STEPPE_DECLARE(portable)

namespace {

struct Variant {
  const char* name;
  bool (*runs)();
  const Kernels* (*table)();
};

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
[[maybe_unused]] bool has_avx512_vnni() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}
// Tiles of bf16 and int8. The kernel gives a process their registers only when it asks.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;
  constexpr long kAskPermission = 0x1023, kTileData = 18;
  return has_avx512_vnni() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) == kTiles &&
         syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Best first.
const Variant kVariants[] = {
#ifdef STEPPE_HAVE_avx512_amx
    {"avx512_amx", has_amx, kernels_avx512_amx},
#endif
#ifdef STEPPE_HAVE_avx512_vnni
    {"avx512_vnni", has_avx512_vnni, kernels_avx512_vnni},
#endif
#ifdef STEPPE_HAVE_avx512
    {"avx512", has_avx512, kernels_avx512},
#endif
#ifdef STEPPE_HAVE_avx2_vnni
    {"avx2_vnni", [] { return has_avx2() && __builtin_cpu_supports("avxvnni"); },
     kernels_avx2_vnni},
#endif
#ifdef STEPPE_HAVE_avx2
    {"avx2", has_avx2, kernels_avx2},
#endif
#ifdef STEPPE_HAVE_neon_dotprod
    {"neon_dotprod", [] { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; },
     kernels_neon_dotprod},
#endif
    {"portable", [] { return true; }, kernels_portable},
};

bool runs(const Variant& v) {
#ifdef STEPPE_EMULATED  // names of variants whose instructions this build, for tests, has in AVX2
  const char* const emulated[] = {STEPPE_EMULATED};
  for (const char* name : emulated)
    if (std::strcmp(name, v.name) == 0) return has_avx2();
#endif
  return v.runs();
}

}  // namespace

const Kernels* kernels_by_name(const char* name) {
  for (const Variant& v : kVariants)
    if (std::strcmp(v.name, name) == 0) return runs(v) ? v.table() : nullptr;
  return nullptr;
}

const Kernels* best_kernels() {
  for (const Variant& v : kVariants)
    if (runs(v)) return v.table();
  return nullptr;
}

int runnable_variants(const char** names, int capacity) {
  int n = 0;
  for (const Variant& v : kVariants)
    if (runs(v) && n < capacity) names[n++] = v.name;
  return n;
}

int built_variants(const char** names, int capacity) {
  int n = 0;
  for (const Variant& v : kVariants)
    if (n < capacity) names[n++] = v.name;
  return n;
}

}  // namespace steppe
