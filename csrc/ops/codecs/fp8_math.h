// The arithmetic of 8-bit floats with a scale for each block, for host and device. Each operation
// rounds separately, as in blockwise_math.h.
//
// A block of values p is sent as 8-bit floats q and, in float32, step = max|p| / (the largest 8-bit
// float): p ~ q * step. If a block has an infinite or NaN value, its step is NaN.
#pragma once

#include <cstdint>

#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::fp8 {

// The dtypes float8_e4m3fn and float8_e5m2.
template <bool kE5M2>
struct Traits {
  static constexpr int kMantissa = kE5M2 ? 2 : 3;
  static constexpr int kBias = kE5M2 ? 15 : 7;
  static constexpr float kLargest = kE5M2 ? 57344.0f : 448.0f;
  static constexpr uint32_t kShift = 23 - kMantissa;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  // The least normal magnitude, and the unit of subnormals.
  static constexpr uint32_t kLeastNormal = static_cast<uint32_t>(128 - kBias) << 23;
  static constexpr float kUnit = kE5M2 ? 0x1p-16f : 0x1p-9f;
  // Adding this to a subnormal rounds it to a multiple of the unit, ties to even.
  static constexpr float kRound = kUnit * 0x1p23f;
};

// Uses a mask instead of a branch: GCC would move floating-point arithmetic into the branch and
// might not vectorise it.
COMMHOOK_HOST_DEVICE uint32_t choose(bool first, uint32_t one, uint32_t other) {
#ifdef __CUDA_ARCH__
  return first ? one : other;
#else
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return (one & mask) | (other & ~mask);
#endif
}

// The nearest 8-bit float, ties to even. |value| may exceed the largest by a few ulps, which the
// rounding removes.
template <bool kE5M2>
COMMHOOK_HOST_DEVICE uint8_t round_to(float value) {
  using T = Traits<kE5M2>;
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kAbsolute;
  const uint32_t even = (magnitude >> T::kShift) & 1u;
  const uint32_t normal =
      (magnitude + ((1u << (T::kShift - 1)) - 1u) + even - T::kRebias) >> T::kShift;
  const uint32_t subnormal = bits_of(float_of(magnitude) + T::kRound) - bits_of(T::kRound);
  const uint32_t code = choose(magnitude < T::kLeastNormal, subnormal, normal);
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80u));
}

template <bool kE5M2>
COMMHOOK_HOST_DEVICE float value_of(uint8_t code) {
  using T = Traits<kE5M2>;
  const uint32_t magnitude = code & 0x7fu;
  const float normal = float_of((magnitude << T::kShift) + T::kRebias);
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * T::kUnit;
  const bool is_subnormal = magnitude < (1u << T::kMantissa);
  return float_of(choose(is_subnormal, bits_of(subnormal), bits_of(normal)) |
                  (static_cast<uint32_t>(code & 0x80u) << 24));
}

}  // namespace commhook::fp8
