// What block quantisation does with a block, for cuda/block_tile.cuh.
#pragma once

#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/float_bits.h"

namespace commhook::cuda {

// Of magnitudes, as bits: those of an infinity or more, where a value is infinite or NaN.
struct LargestMagnitude {
  static constexpr int kWords = 1;
  int32_t words[kWords] = {0};

  COMMHOOK_HOST_DEVICE void add(float value) {
    const auto bits = static_cast<int32_t>(bits_of(value) & kAbsolute);
    words[0] = bits > words[0] ? bits : words[0];
  }
};

// Of values as integers that are ordered as these are, and of their inverses.
struct Extremes {
  static constexpr int kWords = 2;
  int32_t words[kWords] = {INT32_MIN, INT32_MIN};

  COMMHOOK_HOST_DEVICE static int32_t ordered(int32_t bits) {
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }
  COMMHOOK_HOST_DEVICE void add(float value) {
    const int32_t order = ordered(static_cast<int32_t>(bits_of(value)));
    words[0] = order > words[0] ? order : words[0];
    words[1] = ~order > words[1] ? ~order : words[1];
  }
  COMMHOOK_HOST_DEVICE float most() const {
    return float_of(static_cast<uint32_t>(ordered(words[0])));
  }
  COMMHOOK_HOST_DEVICE float least() const {
    return float_of(static_cast<uint32_t>(ordered(~words[1])));
  }
};

template <int kCodeBits, bool kSymmetric>
struct BlockwiseBlock {
  static constexpr int kBits = kCodeBits;
  static constexpr int kParameters = kSymmetric ? 1 : 2;
  static constexpr bool kIsRandom = true;
  static constexpr bool kSums = false;
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
      range = float_of(static_cast<uint32_t>(measure.words[0]));
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

  COMMHOOK_HOST_DEVICE uint32_t code(float value, float dither, bool is_random,
                                     const Quantizer& quantizer, float& restored) const {
    const auto& by = quantizer.by;
    float t = kSymmetric ? value * by.lift * by.factor : (value * by.lift - by.low) * by.factor;
    if (is_random) {
      t = t + dither;
      t = t > kLevels ? kLevels : t;  // what is added may have been rounded up
    }
    const float rounded = t + blockwise::kRound;
    restored = (rounded - blockwise::kRound) * by.step;
    if constexpr (!kSymmetric) {
      restored = quantizer.low + restored;
    }
    return bits_of(rounded) & ((1u << kBits) - 1);
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
