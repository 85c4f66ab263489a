// fp8 for a block, for cuda/block_tile.cuh.
#pragma once

#include "blockwise_block.h"
#include "ops/codecs/fp8_math.h"

namespace commhook::cuda {

template <bool kE5M2>
struct Fp8Block {
  static constexpr int kBits = 8;
  static constexpr int kParameters = 1;
  static constexpr bool kIsRandom = false;
  static constexpr bool kSums = false;
  static constexpr bool kFits = false;
  static constexpr float kLargest = fp8::Traits<kE5M2>::kLargest;

  using Measure = LargestMagnitude;
  using Quantizer = blockwise::Quantizer;

  COMMHOOK_HOST_DEVICE bool quantizer(const Measure& measure, int, float (&parameters)[kParameters],
                                      Quantizer& result) const {
    if (bits_of(measure.words[0]) >= kInfinity) {
      return false;
    }
    result = blockwise::quantizer(measure.words[0], 0.0f, kLargest);
    parameters[0] = result.step;
    return true;
  }

  COMMHOOK_HOST_DEVICE uint32_t code(float value, float, bool, const Quantizer& quantizer,
                                     float& restored) const {
    float scaled = value * quantizer.lift * quantizer.factor;
    scaled = scaled > kLargest ? kLargest : scaled;
    scaled = scaled < -kLargest ? -kLargest : scaled;
    const uint8_t code = fp8::round_to<kE5M2>(scaled);
    restored = fp8::value_of<kE5M2>(code) * quantizer.step;
    return code;
  }

  // Like those of BlockwiseBlock.
  template <bool>
  COMMHOOK_HOST_DEVICE uint32_t codes(Quad& values, const float (&)[kQuadValues],
                                      const Quantizer& quantizer) const {
    float scaled[kQuadValues];
#pragma unroll
    for (int j = 0; j < kQuadValues; ++j) {
      scaled[j] = values.values[j] * quantizer.lift * quantizer.factor;
    }
    const uint32_t word =
        pair_of_fp8<kE5M2>(scaled[0], scaled[1]) | pair_of_fp8<kE5M2>(scaled[2], scaled[3]) << 16;
    const Quad back = restored(word, {quantizer.step});
#pragma unroll
    for (int j = 0; j < kQuadValues; ++j) {
      values.values[j] = values.values[j] - back.values[j];
    }
    return word;
  }

  COMMHOOK_HOST_DEVICE Quad restored(uint32_t word, const float (&parameters)[kParameters]) const {
    Quad values;
#pragma unroll
    for (int j = 0; j < kQuadValues; ++j) {
      values.values[j] = value_of_fp8<kE5M2>(word << (24 - 8 * j)) * parameters[0];
    }
    return values;
  }

  COMMHOOK_HOST_DEVICE auto restorer(const float* parameters) const {
    const float step = parameters[0];
    return
        [step](uint32_t code) { return fp8::value_of<kE5M2>(static_cast<uint8_t>(code)) * step; };
  }
};

}  // namespace commhook::cuda
