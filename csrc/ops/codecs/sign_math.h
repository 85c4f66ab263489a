// The mean magnitude of a block's values, for host and device.
//
// If a sum of magnitudes exceeds float32, it is computed again from values times kLowering. That
// sum is finite if all values are, however it is rounded.
#pragma once

#include "ops/codecs/block_layout.h"
#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::sign {

constexpr float kLowering = 0.5f / codecs::kMaxBlockSize;

template <bool kLowered>
COMMHOOK_HOST_DEVICE float magnitude_of(float value) {
  const float magnitude = float_of(bits_of(value) & kAbsolute);
  return kLowered ? magnitude * kLowering : magnitude;
}

COMMHOOK_HOST_DEVICE float mean_magnitude(float sum, float count, bool is_lowered) {
  if (!is_lowered) {
    return sum / count;
  }
  const float mean = sum / count / kLowering;
  return mean > kLargestFinite ? kLargestFinite : mean;  // the sum may have been rounded up
}

}  // namespace commhook::sign
