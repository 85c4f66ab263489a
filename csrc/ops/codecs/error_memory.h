// CPU kernels read and write the error memory through this class: float32 in place, bfloat16
// through a piece of float32 that stays in the first-level cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/codec_checks.h"

namespace commhook::codecs {

class ErrorMemory {
 public:
  // error: checked by check_error. rounding: if it is random, bfloat16 is rounded at random.
  ErrorMemory(const std::optional<at::Tensor>& error, const Rounding& rounding);

  bool is_there() const { return values_ != nullptr || halves_ != nullptr; }
  bool is_narrow() const { return halves_ != nullptr; }

  // The memory itself; null if it is narrow or missing.
  float* in_place() const { return values_; }

  // For narrow memory: reads the elements [begin, begin + n) as float32, and writes them.
  void read(int64_t begin, int64_t n, float* values) const;
  void write(int64_t begin, int64_t n, const float* values) const;

 private:
  float* values_ = nullptr;
  uint16_t* halves_ = nullptr;
  bool is_random_ = false;
  uint32_t key_ = 0;
};

}  // namespace commhook::codecs
