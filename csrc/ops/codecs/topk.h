// The largest values: shared by the operators' kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/topk_math.h"

namespace commhook::topk {

// A message: the entries' ascending int32 indices, then their float32 values.
constexpr int64_t kBytesOfEntry = sizeof(int32_t) + sizeof(float);

// Each throws an error that names the operator, the argument, its contract and the value.

// Returns the number of all values.
C10_EXPORT int64_t check_encode(at::TensorList tensors, const at::Tensor& message,
                                const std::optional<at::Tensor>& error,
                                const std::optional<at::Tensor>& rounding);
C10_EXPORT void check_decode(const at::Tensor& message, at::TensorList tensors);
// messages: [messages, bytes].
C10_EXPORT void check_decode_sum(const at::Tensor& messages, at::TensorList tensors);
// Throws if a message's indices do not ascend, or an index is beyond the values.
void check_indices(const char* op, bool are_good, int64_t numel);

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding);
// messages: [messages, bytes].
void decode_sum_on_cpu(const char* op, const at::Tensor& messages, at::TensorList tensors,
                       double scale);

}  // namespace commhook::topk
