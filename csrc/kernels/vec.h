// The vector type of this translation unit's variant. Everything that a variant compiles lives in
// its own namespace and uses no inline library templates: otherwise the linker could give a machine
// without AVX-512 a copy of such a function that was compiled with it.
#pragma once
#if defined(__AVX512BW__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

// With real vector registers an array stays in them only if every loop over it is unrolled; where a
// vector is memory anyway, unrolling only makes code.
#if (defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)) && !defined(STEPPE_EMULATED)
#define STEPPE_UNROLL _Pragma("GCC unroll 16")
#else
#define STEPPE_UNROLL _Pragma("GCC unroll 1")
#endif

namespace steppe::STEPPE_VARIANT {

// exp(x), relative error under 2 ulp for x in [-87, 88]; 0 below.
inline V::F exponential(V::F x) {
  const V::F floor = V::set(-87.0f);
  const V::F y = V::min(V::max(x, floor), V::set(88.0f));
  const V::F n = V::round(V::mul(y, V::set(1.44269504088896341f)));
  V::F r = V::fma(n, V::set(-0.693359375f), y);
  r = V::fma(n, V::set(2.12194440e-4f), r);
  V::F p = V::set(1.9875691500e-4f);
  p = V::fma(p, r, V::set(1.3981999507e-3f));
  p = V::fma(p, r, V::set(8.3334519073e-3f));
  p = V::fma(p, r, V::set(4.1665795894e-2f));
  p = V::fma(p, r, V::set(1.6666665459e-1f));
  p = V::fma(p, r, V::set(5.0000001201e-1f));
  p = V::fma(V::mul(r, r), p, r);
  p = V::add(p, V::set(1.0f));
  const V::F scaled = V::as_float(V::iadd(V::as_int(p), V::shl(V::cvt(n), 23)));
  return V::zero_below(x, floor, scaled);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1)
inline V::F hyperbolic_tangent(V::F x) {
  const V::F e = exponential(V::add(x, x));
  return V::sub(V::set(1.0f), V::div(V::set(2.0f), V::add(e, V::set(1.0f))));
}

}  // namespace steppe::STEPPE_VARIANT
