// Block quantisation of a block, for cuda/block_tile.cuh.
#pragma once

#include "instructions.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/float_bits.h"
#include "quad.h"

namespace commhook::cuda {

// The largest magnitude; a NaN if a value is NaN.
struct LargestMagnitude {
  float words[1] = {0.0f};

  COMMHOOK_HOST_DEVICE void add(float value) {
    words[0] = largest(words[0], float_of(bits_of(value) & kAbsolute));
  }
};

// The largest value and the largest negated value; NaNs if a value is NaN. The sign of a zero is
// undefined, and no quantizer depends on it.
struct Extremes {
  float words[2] = {float_of(kInfinity | 1u << 31), float_of(kInfinity | 1u << 31)};

  COMMHOOK_HOST_DEVICE void add(float value) {
    words[0] = largest(words[0], value);
    words[1] = largest(words[1], -value);
  }
  COMMHOOK_HOST_DEVICE float most() const { return words[0]; }
  COMMHOOK_HOST_DEVICE float least() const { return -words[1]; }
};

template <int kCodeBits, bool kSymmetric>
struct BlockwiseBlock {
  static constexpr int kBits = kCodeBits;
  static constexpr int kParameters = kSymmetric ? 1 : 2;
  static constexpr bool kIsRandom = true;
  static constexpr bool kSums = false;
  static constexpr bool kFits = kBits == 2 && kSymmetric;
  static constexpr float kLevels = kSymmetric ? (1 << (kBits - 1)) - 1 : (1 << kBits) - 1;

  using Measure = std::conditional_t<kSymmetric, LargestMagnitude, Extremes>;

  struct Quantizer {
    blockwise::Quantizer by;
    float low;
  };

  COMMHOOK_HOST_DEVICE bool quantizer(const Measure& measure, int, float (&parameters)[kParameters],
                                      Quantizer& result) const {
    float range;
    result.low = 0.0f;
    if constexpr (kSymmetric) {
      range = measure.words[0];
    } else {
      result.low = measure.least() + 0.0f;  // no zero has a sign
      range = measure.most() - result.low + 0.0f;
    }
    if ((bits_of(range) & kAbsolute) >= kInfinity) {
      return false;
    }
    result.by = blockwise::quantizer(range, result.low, kLevels);
    parameters[0] = result.by.step;
    if constexpr (!kSymmetric) {
      parameters[1] = result.low;
    }
    return true;
  }

  // A value's code, in the low bits.
  COMMHOOK_HOST_DEVICE uint32_t rounded(float value, float dither, bool is_random,
                                        const Quantizer& quantizer, float& restored) const {
    const auto& by = quantizer.by;
    float t = kSymmetric ? value * by.lift * by.factor : (value * by.lift - by.low) * by.factor;
    if (is_random) {
      t = t + dither;
      t = t > kLevels ? kLevels : t;  // the sum may have been rounded up
    } else if constexpr (kFits) {
      t = clamped(t, kLevels);
    }
    const float sum = t + blockwise::kRound;
    restored = (sum - blockwise::kRound) * by.step;
    if constexpr (!kSymmetric) {
      restored = quantizer.low + restored;
    }
    return bits_of(sum);
  }

  COMMHOOK_HOST_DEVICE uint32_t code(float value, float dither, bool is_random,
                                     const Quantizer& quantizer, float& restored) const {
    return rounded(value, dither, is_random, quantizer, restored) & ((1u << kBits) - 1);
  }

  // Four values' codes in the low bits of a word's bytes; `values` become the errors.
  template <bool kRandom>
  COMMHOOK_HOST_DEVICE uint32_t codes(Quad& values, const float (&dithers)[kQuadValues],
                                      const Quantizer& quantizer) const {
    uint32_t bits[kQuadValues];
#pragma unroll
    for (int j = 0; j < kQuadValues; ++j) {
      float restored;
      bits[j] = rounded(values.values[j], dithers[j], kRandom, quantizer, restored);
      values.values[j] = values.values[j] - restored;
    }
    return byte_perm(byte_perm(bits[0], bits[1], 0x0040), byte_perm(bits[2], bits[3], 0x0040),
                     0x5410);
  }

  // The values of the codes in a word's bytes; the other bits are zeros. A code becomes the low
  // bits of a float32 with the exponent of 2^23.
  COMMHOOK_HOST_DEVICE Quad restored(uint32_t word, const float (&parameters)[kParameters]) const {
    constexpr uint32_t kSign = kSymmetric ? 1u << (kBits - 1) : 0u;
    constexpr uint32_t kBase = 0x4b000000u;
    word ^= kSign * 0x01010101u;
    Quad values;
#pragma unroll
    for (int j = 0; j < kQuadValues; ++j) {
      const float integer = float_of(byte_perm(word, kBase, 0x7650u + static_cast<uint32_t>(j))) -
                            (0x1p23f + static_cast<float>(kSign));
      values.values[j] = integer * parameters[0];
      if constexpr (!kSymmetric) {
        values.values[j] = parameters[1] + values.values[j];
      }
    }
    return values;
  }

  COMMHOOK_HOST_DEVICE auto restorer(const float* parameters) const {
    const float step = parameters[0];
    const float low = kSymmetric ? 0.0f : parameters[kParameters - 1];
    return [step, low](uint32_t code) {
      constexpr int32_t kSign = kSymmetric ? 1 << (kBits - 1) : 0;
      const auto integer = (static_cast<int32_t>(code) ^ kSign) - kSign;
      const float restored = static_cast<float>(integer) * step;
      return kSymmetric ? restored : low + restored;
    };
  }
};

}  // namespace commhook::cuda
