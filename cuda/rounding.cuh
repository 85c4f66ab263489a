// Random numbers of a message, and the rounding of a bfloat16 error.
#pragma once

#include <cstdint>

#include "ops/codecs/error_math.h"

namespace commhook::cuda {

// rounding: seed and step, as operators receive them.
struct Seed {
  uint32_t low;
  uint32_t high;
  uint32_t step;
};

__device__ inline Seed seed_of(const int64_t* rounding) {
  const auto seed = static_cast<uint64_t>(rounding[0]);
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
          static_cast<uint32_t>(rounding[1])};
}

struct NarrowRounding {
  bool is_random;
  uint32_t key;

  // place: that of the value in the error.
  __device__ uint16_t operator()(float value, int64_t place) const {
    return is_random ? codecs::rounded_at_random(value, static_cast<uint32_t>(place), key)
                     : codecs::nearest(value);
  }
};

// rounding: null rounds to the nearest.
__device__ inline NarrowRounding narrow_rounding(const int64_t* rounding) {
  if (rounding == nullptr) {
    return {false, 0};
  }
  const auto seed = seed_of(rounding);
  return {true, codecs::noise_key(seed.low, seed.high, seed.step)};
}

}  // namespace commhook::cuda
