// AVX-512, VNNI, bf16 and AMX for machines that lack them: the intrinsics that the kernels use, written
// out lane by lane. Put before every source of a variant that is to be tested anywhere (CMakeLists.txt,
// STEPPE_EMULATE); nothing that is installed is compiled with it.
//
// What an instruction does is Intel's Software Developer's Manual, volume 2. A tile that is not
// configured, or in another shape than a product needs, ends the program as it would on the processor.
#pragma once
// The types, and all of AVX2. After it the flags are defined: the headers would take them for the
// compiler's own.
#include <immintrin.h>

#include "emulated_registers.h"
#include "emulated_tiles.h"

#ifdef STEPPE_EMULATES_AVX512F
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#endif
#ifdef STEPPE_EMULATES_AVX512VNNI
#define __AVX512VNNI__ 1
#endif
#ifdef STEPPE_EMULATES_AVX512BF16
#define __AVX512BF16__ 1
#endif
#ifdef STEPPE_EMULATES_AVXVNNI
#define __AVXVNNI__ 1
#endif
#ifdef STEPPE_EMULATES_AMX_BF16
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#endif

#ifdef STEPPE_EMULATES_AVXVNNI
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32(acc, w, a) emulated::dpbusd<__m256i>(acc, w, a)
#endif

#ifdef STEPPE_EMULATES_AVX512F
#undef _mm512_setzero_si512
#define _mm512_setzero_si512() emulated::all<__m512i>(int32_t(0))
#undef _mm512_setzero_ps
#define _mm512_setzero_ps() emulated::all<__m512>(0.0f)
#undef _mm512_set1_epi32
#define _mm512_set1_epi32(x) emulated::all<__m512i>(int32_t(x))
#undef _mm512_set1_epi16
#define _mm512_set1_epi16(x) emulated::all<__m512i>(int16_t(x))
#undef _mm512_set1_epi8
#define _mm512_set1_epi8(x) emulated::all<__m512i>(int8_t(x))
#undef _mm512_set1_ps
#define _mm512_set1_ps(x) emulated::all<__m512>(float(x))
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4(x) emulated::all<__m512i>(x)
#undef _mm512_castps_si512
#define _mm512_castps_si512(a) ((__m512i)(a))
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps(a) ((__m512)(a))
#undef _mm512_loadu_si512
#define _mm512_loadu_si512(p) emulated::loaded<__m512i>(p)
#undef _mm512_loadu_ps
#define _mm512_loadu_ps(p) emulated::loaded<__m512>(p)
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps(mask, p) emulated::load_where(mask, p)
#undef _mm512_storeu_ps
#define _mm512_storeu_ps(p, a) emulated::store_where(p, 0xffff, a)
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(p, mask, a) emulated::store_where(p, mask, a)
#undef _mm512_store_ps
#define _mm512_store_ps(p, a) emulated::store_aligned<__m512>(p, a)
#undef _mm512_store_si512
#define _mm512_store_si512(p, a) emulated::store_aligned<__m512i>(p, a)
#undef _mm512_mask_mov_ps
#define _mm512_mask_mov_ps(otherwise, mask, a) emulated::selected(otherwise, mask, a)
#undef _mm512_maskz_mov_ps
#define _mm512_maskz_mov_ps(mask, a) emulated::selected(emulated::all<__m512>(0.0f), mask, a)
#undef _mm512_maskz_set1_epi8
#define _mm512_maskz_set1_epi8(mask, x) emulated::set8_where(mask, int8_t(x))
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::not_less<predicate>(a, b)
#undef _mm512_add_epi32
#define _mm512_add_epi32(a, b) emulated::add32(a, b)
#undef _mm512_max_epi32
#define _mm512_max_epi32(a, b) emulated::max32(a, b)
#undef _mm512_sub_epi8
#define _mm512_sub_epi8(a, b) emulated::sub8(a, b)
#undef _mm512_and_si512
#define _mm512_and_si512(a, b) ((a) & (b))
#undef _mm512_or_si512
#define _mm512_or_si512(a, b) ((a) | (b))
#undef _mm512_slli_epi32
#define _mm512_slli_epi32(a, n) emulated::shl32(a, n)
#undef _mm512_srli_epi32
#define _mm512_srli_epi32(a, n) emulated::shr32(a, n)
#undef _mm512_slli_epi16
#define _mm512_slli_epi16(a, n) emulated::shl16(a, n)
#undef _mm512_srli_epi16
#define _mm512_srli_epi16(a, n) emulated::shr16(a, n)
#undef _mm512_srai_epi16
#define _mm512_srai_epi16(a, n) emulated::sar16(a, n)
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8(table, index) emulated::shuffle8(table, index)
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) emulated::madd16(a, b)
#undef _mm512_maddubs_epi16
#define _mm512_maddubs_epi16(a, b) emulated::maddubs16(a, b)
#undef _mm512_add_ps
#define _mm512_add_ps(a, b) ((a) + (b))
#undef _mm512_sub_ps
#define _mm512_sub_ps(a, b) ((a) - (b))
#undef _mm512_mul_ps
#define _mm512_mul_ps(a, b) ((a) * (b))
#undef _mm512_div_ps
#define _mm512_div_ps(a, b) ((a) / (b))
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps(a, b, c) emulated::fused(a, b, c)
#undef _mm512_max_ps
#define _mm512_max_ps(a, b) emulated::greater(a, b)
#undef _mm512_min_ps
#define _mm512_min_ps(a, b) emulated::less(a, b)
#undef _mm512_abs_ps
#define _mm512_abs_ps(a) emulated::absolute(a)
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(a, how) emulated::rounded<how>(a)
#undef _mm512_scalef_ps
#define _mm512_scalef_ps(a, n) emulated::scale_by(a, n)
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(a) emulated::to_float(a)
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(a) emulated::to_int(a)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(a) emulated::from_half(a)
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, how) emulated::to_half<how>(a)
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(a) emulated::widened_lanes<uint8_t>(a)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(a) emulated::widened_lanes<int8_t>(a)
#undef _mm512_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi8(a) emulated::to_bytes(a)
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(a) emulated::low_words(a)
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps(a) emulated::most(a)
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps(a) emulated::total(a)
#undef _mm512_reduce_max_epi32
#define _mm512_reduce_max_epi32(a) emulated::most(a)
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32(a) emulated::total(a)
#endif

#ifdef STEPPE_EMULATES_AVX512VNNI
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32(acc, w, a) emulated::dpbusd<__m512i>(acc, w, a)
#endif

#ifdef STEPPE_EMULATES_AVX512BF16
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh(a) emulated::to_bf16(a)
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(acc, a, b) emulated::dpbf16(acc, a, b)
#endif

#ifdef STEPPE_EMULATES_AMX_BF16
#undef _tile_loadconfig
#define _tile_loadconfig(p) emulated::configure(p)
#undef _tile_release
#define _tile_release() emulated::release()
#undef _tile_loadd
#define _tile_loadd(t, p, stride) emulated::tile_load(t, p, stride)
#undef _tile_stored
#define _tile_stored(t, p, stride) emulated::tile_store(t, p, stride)
#undef _tile_zero
#define _tile_zero(t) emulated::tile_clear(t)
#undef _tile_dpbssd
#define _tile_dpbssd(c, a, b) emulated::tile_dpbssd(c, a, b)
#undef _tile_dpbsud
#define _tile_dpbsud(c, a, b) emulated::tile_dpbsud(c, a, b)
#undef _tile_dpbf16ps
#define _tile_dpbf16ps(c, a, b) emulated::tile_dpbf16(c, a, b)
#endif
