// The arithmetic of block quantisation, for host and device. Each operation rounds separately: the
// build turns off fused multiply-adds (setup.py), so that all kernels give the same bits.
//
// A block of values p is sent as integers q and float32 parameters that restore the values:
//   symmetric   p ~ q * step,        step = max|p| / n,           -n <= q <= n,  n = 2^(bits-1) - 1
//   min-max     p ~ low + q * step,  step = (max - min) / n,       0 <= q <= n,  n = 2^bits - 1
// Symmetric codes of two bits that are rounded to the nearest have a smaller step: see Fit.
// If a block has an infinite or NaN value, or an infinite range, its step is NaN. In all other
// blocks each q is restored as a finite value.
#pragma once

#include <cstdint>

#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::blockwise {

// Adding this to a float of magnitude at most 2^22 rounds the float to an integer, ties to even.
// The integer is then in the low bits of the sum.
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23

// Multiplies step and factor of a block if its largest q would be restored as an infinity, because
// the step was rounded up. It outweighs a few roundings up.
constexpr float kNarrowing = 1.0f - 0x1p-22f;

// Turns a block's values into integers: q = round((p * lift - low) * factor).
struct Quantizer {
  float step;
  float low;     // of p * lift; 0 if symmetric
  float lift;    // a power of two; 1 unless values are so small that `factor` would be infinite
  float factor;  // 0 if all values are equal
};

// range: max|p| if symmetric, else max - min. Finite.
COMMHOOK_HOST_DEVICE Quantizer quantizer(float range, float low, float levels) {
  // Not 0: lifting would overflow large values.
  const bool is_small = range > 0.0f && range < 0x1p-100f;
  const float lift = is_small ? 0x1p64f : 1.0f;
  const float lifted = range * lift;
  const float inverse = levels / lifted;  // unused if it divides by zero
  const float step = range / levels;
  // Random rounding reaches -n - 1 only with 8 bits, and only if that is finite. For larger ranges,
  // the rounding of the factor is too small for a value below -n.
  const bool is_finite = low + step * levels <= kLargestFinite;
  const float narrowing = is_finite ? 1.0f : kNarrowing;
  return {step * narrowing, low * lift, lift, lifted > 0.0f ? inverse * narrowing : 0.0f};
}

// The step of symmetric codes of two bits that are rounded to the nearest. With max|p| as the step,
// most values would become zeros. So the step is the mean of the magnitudes above a threshold,
// which is optimal for these values. The threshold is the mean magnitude times kThreshold. On a
// Gaussian the threshold is half the step, 0.612 sigma, so that both are optimal; the step is 1.224
// sigma. If all nonzero magnitudes are equal, they are restored exactly. (Li, Zhang, Liu, "Ternary
// Weight Networks", 2016, for weights.)
//
// Magnitudes are added as integers, in units of a fraction of the largest one. So the sums have the
// same bits in any order.
struct Fit {
  float largest;
  float factor;
};

// Units in the largest magnitude: 4,096 of these fit into 31 bits.
constexpr float kUnits = 0x1p18f;
constexpr float kThreshold = 0.767f;
// Adding this to a float from 0 to 2^22 rounds it to an integer, in the low bits of the sum.
constexpr float kWhole = 0x1p23f;
constexpr uint32_t kWholeBits = 0x4b000000u;

// range: max|p|, finite. The units have a lower limit: below 2^-109 the factor would be infinite.
COMMHOOK_HOST_DEVICE Fit fit_to(float range) {
  const float largest = range > 0x1p-109f ? range : 0x1p-109f;
  return {largest, kUnits / largest};
}

// A magnitude in units, added to kWholeBits.
COMMHOOK_HOST_DEVICE uint32_t in_units(float value, float factor) {
  return bits_of(float_of(bits_of(value) & kAbsolute) * factor + kWhole);
}

// Magnitudes above this count as larger. sum: of the units of `count` values.
COMMHOOK_HOST_DEVICE uint32_t threshold(uint32_t sum, int32_t count) {
  return bits_of(static_cast<float>(static_cast<int32_t>(sum)) * kThreshold /
                     static_cast<float>(count) +
                 kWhole);
}

// sum: of the units of the `count` larger values. count is 0 if all values are near 0.
COMMHOOK_HOST_DEVICE float fitted_step(const Fit& fit, float range, uint32_t sum, uint32_t count) {
  const float mean = static_cast<float>(static_cast<int32_t>(sum)) /
                     static_cast<float>(static_cast<int32_t>(count)) * (1.0f / kUnits);
  const float step = fit.largest * mean;
  return count > 0 && step < range ? step : range;  // units may have been rounded up
}

// A number in (-0.5, 0.5), evenly spread over 2^16 values. Added before rounding to the nearest, it
// makes rounding stochastic and unbiased.
COMMHOOK_HOST_DEVICE float dither(uint32_t random16) {
  return (static_cast<float>(static_cast<int32_t>(random16)) - 32767.5f) * 0x1p-16f;
}

}  // namespace commhook::blockwise
