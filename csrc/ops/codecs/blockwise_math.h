// The arithmetic of block quantisation, for host and device. Each step is rounded by itself: fused
// multiply-adds are switched off where this is compiled (setup.py), so that all kernels give the
// same bits.
//
// A block of values p is sent as integers q and, in float32, what maps them back:
//   symmetric   p ~ q * step,        step = max|p| / n,           -n <= q <= n,  n = 2^(bits-1) - 1
//   min-max     p ~ low + q * step,  step = (max - min) / n,       0 <= q <= n,  n = 2^bits - 1
// A block with a value that is infinite or NaN, or whose range is, has a NaN for step. In all other
// blocks each q comes back finite.
#pragma once

#include <cstdint>

#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::blockwise {

// Added to a float of at most 2^22 either way, this rounds it to an integer, ties to even; that is
// then in the low bits of the sum.
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23

// Step and factor of a block whose largest q would come back as an infinity, since the step was
// rounded up, are multiplied by this. A few roundings up do not make up for it.
constexpr float kNarrowing = 1.0f - 0x1p-22f;

// How a block's values become integers: q = round((p * lift - low) * factor).
struct Quantizer {
  float step;
  float low;     // of p * lift; 0 where symmetric
  float lift;    // a power of two, 1 but for values so small that `factor` would be infinite
  float factor;  // 0 where all values are one
};

// range: max|p| where symmetric, else max - min. Finite.
COMMHOOK_HOST_DEVICE Quantizer quantizer(float range, float low, float levels) {
  const bool is_small = range > 0.0f && range < 0x1p-100f;  // not 0: lifted, large values overflow
  const float lift = is_small ? 0x1p64f : 1.0f;
  const float lifted = range * lift;
  const float inverse = levels / lifted;  // by no zero where it is taken
  const float step = range / levels;
  // Random rounding reaches -n - 1 only with 8 bits and where that is finite: for larger ranges the
  // factor is rounded by so little that no value comes to less than -n.
  const bool is_finite = low + step * levels <= kLargestFinite;
  const float narrowing = is_finite ? 1.0f : kNarrowing;
  return {step * narrowing, low * lift, lift, lifted > 0.0f ? inverse * narrowing : 0.0f};
}

// In (-0.5, 0.5), evenly spread over 2^16 values: added before rounding to the nearest, it makes
// rounding stochastic, without a bias.
COMMHOOK_HOST_DEVICE float dither(uint32_t random16) {
  return (static_cast<float>(static_cast<int32_t>(random16)) - 32767.5f) * 0x1p-16f;
}

}  // namespace commhook::blockwise
