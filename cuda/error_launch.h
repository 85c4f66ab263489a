// Errors of 16 bits. The kernels of codecs read and write them as float32.
#pragma once

#include <ATen/ATen.h>

#include <optional>

#include "ops/codecs/codec_checks.h"
#include "sources.h"

namespace commhook::cuda {

// Rounds float32 values to `error`, bfloat16 with as many elements. rounding: seed and step of the
// random numbers, on the device; null rounds to the nearest. Uses the current stream of the current
// device, launches nothing if there are no elements, and never waits for the device.
void launch_narrow_error(const at::Tensor& values, const int64_t* rounding,
                         const at::Tensor& error);

// An error as float32: the error itself, or a copy.
class WideError {
 public:
  // error: checked by check_error, on the current device.
  WideError(const char* op, const std::optional<at::Tensor>& error) {
    if (codecs::is_there(error)) {
      check_aligned(op, "error", -1, *error);
      error_ = *error;
      wide_ = error->scalar_type() == at::kFloat ? *error : error->detach().to(at::kFloat);
    }
  }

  // Null if there is no error.
  float* data() const { return wide_.defined() ? wide_.mutable_data_ptr<float>() : nullptr; }

  // Writes a copy back, after the kernels that change it.
  void finish(const int64_t* rounding = nullptr) const {
    if (wide_.defined() && error_.scalar_type() != at::kFloat) {
      launch_narrow_error(wide_, rounding, error_);
    }
  }

 private:
  at::Tensor error_;
  at::Tensor wide_;
};

}  // namespace commhook::cuda
