// The largest values: what the operators' kernels share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::topk {

// A message: the indices of its entries, int32 and ascending, then their values, float32.
constexpr int64_t kBytesOfEntry = sizeof(int32_t) + sizeof(float);

// By which values are chosen, the largest first: that of a NaN is above all others.
COMMHOOK_HOST_DEVICE int32_t rank_of(float value) {
  const uint32_t magnitude = bits_of(value) & kAbsolute;
  return static_cast<int32_t>(magnitude > kInfinity ? kInfinity + 1 : magnitude);
}

// As it is sent: the bits of a NaN depend on the instructions that made it.
COMMHOOK_HOST_DEVICE float sent(float value) {
  return rank_of(value) > static_cast<int32_t>(kInfinity) ? float_of(kNaN) : value;
}

// Throws where a message's indices are not ascending, or one is none of a value.
void check_indices(const char* op, bool are_good, int64_t numel);

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, double scale,
                   const std::optional<at::Tensor>& error);
// messages: [messages, bytes].
void decode_sum_on_cpu(const char* op, const at::Tensor& messages, at::TensorList tensors,
                       double scale);

}  // namespace commhook::topk
