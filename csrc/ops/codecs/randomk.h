// Values at random places: shared by the operators' kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/randomk_math.h"

namespace commhook::randomk {

// A message: the values, float32, in the order in which their indices are drawn.
constexpr int64_t kBytesOfEntry = sizeof(float);

// Each throws an error that names the operator, the argument, its contract and the value; otherwise
// it returns the number of all values.

// scale: multiplied by the factor that makes the message unbiased, if `unbiased` is set.
C10_EXPORT int64_t check_encode(at::TensorList tensors, const at::Tensor& message,
                                const at::Tensor& rounding, bool unbiased,
                                const std::optional<at::Tensor>& error, double& scale);
C10_EXPORT int64_t check_decode(const at::Tensor& message, at::TensorList tensors,
                                const at::Tensor& rounding);

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, const Draw& draw,
                   double scale, const std::optional<at::Tensor>& error);
void decode_on_cpu(const at::Tensor& message, at::TensorList tensors, const Draw& draw);

}  // namespace commhook::randomk
