// Row kernels for processors with AVX-512 (F, BW, VL, DQ). Only this file enables the instruction
// set, so that the library also runs without it.
#include "ops/cpu/row_kernels.h"

#ifdef COMMHOOK_X86_KERNELS

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(                                                           \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,bmi2,popcnt"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,bmi2,popcnt")
#endif

namespace commhook::cpu {
namespace avx512 {

constexpr int64_t kWidth = 16;
using Vec = __m512;

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline __m256i load_16bit(const void* p, int64_t n) {
  return n == kWidth ? _mm256_loadu_si256(static_cast<const __m256i*>(p))
                     : _mm256_maskz_loadu_epi16(first(n), p);
}

inline Vec load(const float* p, int64_t n) {
  return n == kWidth ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first(n), p);
}
inline Vec load(const c10::Half* p, int64_t n) { return _mm512_cvtph_ps(load_16bit(p, n)); }
inline Vec load(const c10::BFloat16* p, int64_t n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16bit(p, n)), 16));
}

template <bool kStream>
inline void store(float* p, Vec v, int64_t n) {
  if constexpr (kStream) {
    _mm512_stream_ps(p, v);
  } else if (n == kWidth) {
    _mm512_storeu_ps(p, v);
  } else {
    _mm512_mask_storeu_ps(p, first(n), v);
  }
}

template <bool kStream>
inline void store_16bit(void* p, __m256i v, int64_t n) {
  if constexpr (kStream) {
    _mm256_stream_si256(static_cast<__m256i*>(p), v);
  } else if (n == kWidth) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), v);
  } else {
    _mm256_mask_storeu_epi16(p, first(n), v);
  }
}

template <bool kStream>
inline void store(c10::Half* p, Vec v, int64_t n) {
  store_16bit<kStream>(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}

template <bool kStream>
inline void store(c10::BFloat16* p, Vec v, int64_t n) {
  // Rounds to the nearest, ties to even, in integers: AVX512_BF16's own conversion would flush
  // denormals. A NaN would overflow into the sign, so it becomes the quiet NaN.
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  const __m512i clean = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  store_16bit<kStream>(p, _mm512_cvtepi32_epi16(clean), n);
}

inline Vec multiply(Vec v, float scale) { return _mm512_mul_ps(v, _mm512_set1_ps(scale)); }
inline void fence() { _mm_sfence(); }

#include "ops/cpu/overflow.inl"

template <typename To>
struct Measure {
  __m512d low;
  __m512d high;
  int64_t nonfinite = 0;

  // An implicit constructor would not be compiled for this instruction set.
  Measure() : low(_mm512_setzero_pd()), high(_mm512_setzero_pd()) {}

  void add(Vec v, int64_t n) {
    if (n != kWidth) {
      v = _mm512_maskz_mov_ps(first(n), v);  // padding times an infinite scale is NaN
    }
    const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    const __m512d b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
    const __mmask16 overflowing =
        _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(overflow<To>()), _CMP_NLT_UQ);
    nonfinite += __builtin_popcount(overflowing);
  }
  void finish(RowStats* stats) const {
    double lanes[8];
    _mm512_storeu_pd(lanes, _mm512_add_pd(low, high));
    stats->sum_of_squares += ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
                             ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    stats->nonfinite_count += nonfinite;
  }
};

#include "ops/cpu/row_kernels.inl"

}  // namespace avx512
}  // namespace commhook::cpu

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace commhook::cpu {
const RowKernels kRowKernelsAvx512 = avx512::kKernels;
}  // namespace commhook::cpu

#endif  // COMMHOOK_X86_KERNELS
