// Row kernels for processors with AVX2, FMA and F16C. Only this file enables the instruction set,
// so that the library also runs without it.
#include "ops/cpu/row_kernels.h"

#ifdef COMMHOOK_X86_KERNELS

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,popcnt")
#endif

namespace commhook::cpu {
namespace avx2 {

constexpr int64_t kWidth = 8;
using Vec = __m256;

// Copies a row that is shorter than a vector to the stack.
template <typename T>
inline const T* padded(const T* p, int64_t n, T* copy) {
  for (int64_t i = 0; i < kWidth; ++i) {
    copy[i] = i < n ? p[i] : T(0);
  }
  return copy;
}

inline Vec load_full(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load_full(const c10::Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_full(const c10::BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
template <typename T>
inline Vec load(const T* p, int64_t n) {
  if (n == kWidth) {
    return load_full(p);
  }
  T copy[kWidth];
  return load_full(padded(p, n, copy));
}

inline void store_full(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void stream_full(float* p, Vec v) { _mm256_stream_ps(p, v); }

inline __m128i to_16bit(Vec v, const c10::Half*) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline __m128i to_16bit(Vec v, const c10::BFloat16*) {
  // Rounds to the nearest, ties to even, in integers. A NaN would overflow into the sign, so it
  // becomes the quiet NaN.
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i clean = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_packus_epi32(clean, clean);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
template <typename T>
inline void store_full(T* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_16bit(v, p));
}
template <typename T>
inline void stream_full(T* p, Vec v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_16bit(v, p));
}
template <bool kStream, typename T>
inline void store(T* p, Vec v, int64_t n) {
  if constexpr (kStream) {
    stream_full(p, v);
  } else if (n == kWidth) {
    store_full(p, v);
  } else {
    T copy[kWidth];
    store_full(copy, v);
    for (int64_t i = 0; i < n; ++i) {
      p[i] = copy[i];
    }
  }
}

inline Vec multiply(Vec v, float scale) { return _mm256_mul_ps(v, _mm256_set1_ps(scale)); }
inline void fence() { _mm_sfence(); }

#include "ops/cpu/overflow.inl"

template <typename To>
struct Measure {
  __m256d low;
  __m256d high;
  int64_t nonfinite = 0;

  // An implicit constructor would not be compiled for this instruction set.
  Measure() : low(_mm256_setzero_pd()), high(_mm256_setzero_pd()) {}

  void add(Vec v, int64_t n) {
    if (n != kWidth) {  // padding times an infinite scale is NaN
      const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
      const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
      v = _mm256_and_ps(v, _mm256_castsi256_ps(inside));
    }
    const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
    const __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
    low = _mm256_fmadd_pd(a, a, low);
    high = _mm256_fmadd_pd(b, b, high);
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
    const __m256 overflowing =
        _mm256_cmp_ps(magnitude, _mm256_set1_ps(overflow<To>()), _CMP_NLT_UQ);
    nonfinite += __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(overflowing)));
  }
  void finish(RowStats* stats) const {
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(low, high));
    stats->sum_of_squares += (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    stats->nonfinite_count += nonfinite;
  }
};

#include "ops/cpu/row_kernels.inl"

}  // namespace avx2
}  // namespace commhook::cpu

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace commhook::cpu {
const RowKernels kRowKernelsAvx2 = avx2::kKernels;
}  // namespace commhook::cpu

#endif  // COMMHOOK_X86_KERNELS
