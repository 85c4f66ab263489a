// The lanes of a block compute the step of Fit in blockwise_math.h.
#pragma once

#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/float_bits.h"
#include "warp.cuh"

namespace commhook::cuda {

// Each lane adds its values with add(), and again with add_larger(). Between these, all lanes of
// the warp call find_threshold(), and at the end take().
class FittedStep {
 public:
  COMMHOOK_HOST_DEVICE explicit FittedStep(float range)
      : fit_(blockwise::fit_to(range)), range_(range) {}

  COMMHOOK_HOST_DEVICE void add(float value) {
    sum_ += blockwise::in_units(value, fit_.factor) - blockwise::kWholeBits;
  }

  // lanes: the lanes of a block; the block has `count` values.
  __device__ void find_threshold(int lanes, int count) {
    threshold_ = static_cast<int32_t>(blockwise::threshold(add_up(lanes, sum_), count));
    sum_ = 0;
    forget(fit_.factor);
  }

  COMMHOOK_HOST_DEVICE void add_larger(float value) {
    const uint32_t bits = blockwise::in_units(value, fit_.factor);
    if (static_cast<int32_t>(bits) > threshold_) {
      sum_ += bits - blockwise::kWholeBits;
      ++count_;
    }
  }

  // Replaces the largest magnitude by the step if that magnitude is finite.
  template <typename Measure>
  __device__ void take(int lanes, Measure& measure) {
    sum_ = add_up(lanes, sum_);
    count_ = add_up(lanes, count_);
    if (bits_of(range_) < kInfinity) {
      measure.words[0] = blockwise::fitted_step(fit_, range_, sum_, count_);
    }
  }

 private:
  blockwise::Fit fit_;
  float range_;
  uint32_t sum_ = 0;
  uint32_t count_ = 0;
  int32_t threshold_ = 0;
};

}  // namespace commhook::cuda
