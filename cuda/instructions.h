// Single instructions of the GPU, and their equivalents on the host.
#pragma once

#include <cstdint>

#include "ops/codecs/float_bits.h"
#include "ops/codecs/fp8_math.h"
#include "ops/host_device.h"

namespace commhook::cuda {

// Byte i of the result is the byte of `high:low` that digit i of the selector names.
COMMHOOK_HOST_DEVICE uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> (4 * i) & 7u;
    result |= static_cast<uint32_t>(bytes >> (8 * from) & 0xffu) << (8 * i);
  }
  return result;
#endif
}

// Stores four words at an aligned address of 16 bytes. The compiler splits structs and even vectors
// into stores of a word each, but not this.
template <bool kShared>
COMMHOOK_HOST_DEVICE void store_vector(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#ifdef __CUDA_ARCH__
  if constexpr (kShared) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  } else {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  }
#else
  struct alignas(16) Vector {
    uint32_t words[4];
  };
  const Vector vector{{a, b, c, d}};
  *static_cast<Vector*>(__builtin_assume_aligned(to, 16)) = vector;
#endif
}

// A NaN if either value is NaN. Of two zeros, either may be the result.
COMMHOOK_HOST_DEVICE float largest(float a, float b) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

// Hides the origin of a value, so that the compiler recomputes its results. Otherwise it would keep
// a result for each of a lane's values, and registers would run out.
COMMHOOK_HOST_DEVICE void forget([[maybe_unused]] float& value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+f"(value));
#endif
}

// The number in [-most, most] that is nearest to `value`.
COMMHOOK_HOST_DEVICE float clamped(float value, float most) {
#ifdef __CUDA_ARCH__
  return fminf(fmaxf(value, -most), most);
#else
  value = value > most ? most : value;
  return value < -most ? -most : value;
#endif
}

// Two 8-bit floats in 16 bits, rounded as in fp8::round_to; larger values become the largest one.
template <bool kE5M2>
COMMHOOK_HOST_DEVICE uint32_t pair_of_fp8(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (kE5M2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  constexpr float kLargest = fp8::Traits<kE5M2>::kLargest;
  const auto rounded = [](float value) {
    value = value > kLargest ? kLargest : value;
    value = value < -kLargest ? -kLargest : value;
    return uint32_t{fp8::round_to<kE5M2>(value)};
  };
  return rounded(low) | rounded(high) << 8;
#endif
}

// The value of an 8-bit float in the word's highest byte, as fp8::value_of gives it for all codes.
// The GPU's own conversion gives other NaNs. Here the code's exponent becomes a float32's, too
// small by a constant. The product with a power of two corrects it, also exactly for subnormal
// codes.
template <bool kE5M2>
COMMHOOK_HOST_DEVICE float value_of_fp8(uint32_t word) {
  using T = fp8::Traits<kE5M2>;
  constexpr int kDown = 24 - static_cast<int>(T::kShift);
  constexpr float kUp = kE5M2 ? 0x1p112f : 0x1p120f;
  const auto spread = static_cast<uint32_t>(static_cast<int32_t>(word) >> kDown);
  return float_of(spread & (0x80000000u | 0x7fu << T::kShift)) * kUp;
}

// blockwise::dither of the word's lower or upper 16 bits, which become part of a float32 in [1, 2).
COMMHOOK_HOST_DEVICE float dither_of_half(uint32_t word, bool is_upper) {
  const uint32_t bits = is_upper ? word >> 9 : word << 7;
  return float_of((bits & 0x007fff80u) | 0x3f800000u) - (1.5f - 0x1p-17f);
}

}  // namespace commhook::cuda
