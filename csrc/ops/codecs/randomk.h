// Values at random places: what the operators' kernels share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/randomk_math.h"

namespace commhook::randomk {

// A message: the values, float32, in the order in which their indices are drawn.
constexpr int64_t kBytesOfEntry = sizeof(float);

// Each throws an error that names the operator, the argument, its contract and the value; else
// returns the number of all values.

// scale: multiplied by what makes the message unbiased, where it is to be.
C10_EXPORT int64_t check_encode(at::TensorList tensors, const at::Tensor& message,
                                const at::Tensor& rounding, bool unbiased,
                                const std::optional<at::Tensor>& error, double& scale);
C10_EXPORT int64_t check_decode(const at::Tensor& message, at::TensorList tensors,
                                const at::Tensor& rounding);

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, const Draw& draw,
                   double scale, const std::optional<at::Tensor>& error);
void decode_on_cpu(const at::Tensor& message, at::TensorList tensors, const Draw& draw);

}  // namespace commhook::randomk
