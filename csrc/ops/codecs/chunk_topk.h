// The largest values of each chunk: shared by the operators' kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/chunk_topk_math.h"

namespace commhook::chunk_topk {

// Each throws an error that names the operator, the argument, its contract and the value.

C10_EXPORT Form check_encode(at::TensorList tensors, const at::Tensor& message, int64_t k,
                             int64_t chunk, int64_t bits, const std::optional<at::Tensor>& error,
                             const std::optional<at::Tensor>& rounding);
C10_EXPORT Form check_decode(const at::Tensor& message, at::TensorList tensors, int64_t k,
                             int64_t chunk, int64_t bits);
// messages: [messages, bytes].
C10_EXPORT Form check_decode_sum(const at::Tensor& messages, at::TensorList tensors, int64_t k,
                                 int64_t chunk, int64_t bits);
// Throws if a message's places do not ascend, or a place is beyond the chunk.
void check_places(const char* op, bool are_good);

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, const Form& form,
                   double scale, const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding);
// messages: [messages, bytes].
void decode_sum_on_cpu(const char* op, const at::Tensor& messages, at::TensorList tensors,
                       const Form& form, double scale);

}  // namespace commhook::chunk_topk
