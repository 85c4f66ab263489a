// sign for a block, for cuda/block_tile.cuh.
#pragma once

#include "block_codes.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/sign_math.h"
#include "ops/host_device.h"

namespace commhook::cuda {

struct SignBlock {
  static constexpr int kBits = 1;
  static constexpr int kParameters = 1;
  static constexpr bool kIsRandom = false;
  static constexpr bool kSums = true;
  static constexpr bool kFits = false;

  using Measure = SumOfMagnitudes;

  struct Quantizer {
    uint32_t magnitude;  // as bits
  };

  COMMHOOK_HOST_DEVICE bool quantizer(const Measure& measure, int count,
                                      float (&parameters)[kParameters], Quantizer& result) const {
    if (bits_of(measure.sum) >= kInfinity) {
      return false;
    }
    parameters[0] =
        sign::mean_magnitude(measure.sum, static_cast<float>(count), measure.is_lowered);
    result.magnitude = bits_of(parameters[0]);
    return true;
  }

  COMMHOOK_HOST_DEVICE uint32_t code(float value, float, bool, const Quantizer& quantizer,
                                     float& restored) const {
    const uint32_t negative = bits_of(value) >> 31;
    restored = float_of(quantizer.magnitude ^ negative << 31);
    return negative;
  }

  COMMHOOK_HOST_DEVICE auto restorer(const float* parameters) const {
    const uint32_t magnitude = bits_of(parameters[0]);
    return [magnitude](uint32_t code) { return float_of(magnitude ^ code << 31); };
  }
};

}  // namespace commhook::cuda
