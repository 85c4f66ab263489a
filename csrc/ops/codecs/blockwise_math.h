// The arithmetic of block quantisation, for host and device. Each step is rounded by itself: fused
// multiply-adds are switched off where this is compiled (setup.py), so that all kernels give the
// same bits.
//
// A block of values p is sent as integers q and, in float32, what maps them back:
//   symmetric   p ~ q * step,        step = max|p| / n,           -n <= q <= n,  n = 2^(bits-1) - 1
//   min-max     p ~ low + q * step,  step = (max - min) / n,       0 <= q <= n,  n = 2^bits - 1
// Symmetric codes of two bits that are rounded to the nearest have a smaller step: see Fit.
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

// The step of two bits, symmetric, rounded to the nearest. With max|p| for a step most values would
// be zeros. So the step is the mean of the magnitudes above a threshold, which is the best for
// these; the threshold is the mean magnitude times kThreshold. On a Gaussian that is half the step,
// 0.612 sigma, so that step and threshold are the best of all: 1.224 sigma. Where all magnitudes
// but zeros are one, they come back exactly. (Li, Zhang, Liu, "Ternary Weight Networks", 2016, for
// weights.)
//
// Magnitudes are added up as integers, in units of a part of the largest one: in any order the sums
// have the same bits.
struct Fit {
  float largest;
  float factor;
};

constexpr float kUnits = 0x1p18f;  // of the largest magnitude: 4,096 of them fit into 31 bits
constexpr float kThreshold = 0.767f;
// Added to a float from 0 to 2^22, this rounds it to an integer, which the sum has in its low bits.
constexpr float kWhole = 0x1p23f;
constexpr uint32_t kWholeBits = 0x4b000000u;

// range: max|p|, finite. Below 2^-109 the units are no smaller, or the factor would be infinite.
COMMHOOK_HOST_DEVICE Fit fit_to(float range) {
  const float largest = range > 0x1p-109f ? range : 0x1p-109f;
  return {largest, kUnits / largest};
}

// A magnitude in units, added to kWholeBits.
COMMHOOK_HOST_DEVICE uint32_t in_units(float value, float factor) {
  return bits_of(float_of(bits_of(value) & kAbsolute) * factor + kWhole);
}

// Magnitudes above this are larger. sum: of the units of `count` values.
COMMHOOK_HOST_DEVICE uint32_t threshold(uint32_t sum, int32_t count) {
  return bits_of(static_cast<float>(static_cast<int32_t>(sum)) * kThreshold /
                     static_cast<float>(count) +
                 kWhole);
}

// sum: of the units of the `count` values that are larger. None are where all are near 0.
COMMHOOK_HOST_DEVICE float fitted_step(const Fit& fit, float range, uint32_t sum, uint32_t count) {
  const float mean = static_cast<float>(static_cast<int32_t>(sum)) /
                     static_cast<float>(static_cast<int32_t>(count)) * (1.0f / kUnits);
  const float step = fit.largest * mean;
  return count > 0 && step < range ? step : range;  // units may have been rounded up
}

// In (-0.5, 0.5), evenly spread over 2^16 values: added before rounding to the nearest, it makes
// rounding stochastic, without a bias.
COMMHOOK_HOST_DEVICE float dither(uint32_t random16) {
  return (static_cast<float>(static_cast<int32_t>(random16)) - 32767.5f) * 0x1p-16f;
}

}  // namespace commhook::blockwise
