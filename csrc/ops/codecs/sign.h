// Signs of values, with the mean magnitude of each block: what the operators take, and their
// kernels in plain ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/codecs/block_codec.h"

namespace commhook::sign {

// A block of values p is sent as a bit for each, set where p is negative, and s = sum|p| / count in
// float32: p ~ s or -s. Bits: that of value b * width + c is bit b of byte c, of `width` bytes. The
// sum is taken in 16 lanes, value i in lane i mod 16, which are then added in halves.
constexpr int64_t kLanes = 16;

codecs::BlockForm check_form(const char* op, int64_t block_size);

namespace reference {
void encode(at::TensorList tensors, const at::Tensor& message, const codecs::BlockLayout& layout,
            double scale, const std::optional<at::Tensor>& error);
void decode(const at::Tensor& message, at::TensorList tensors, const codecs::BlockLayout& layout);
void reduce(const at::Tensor& messages, const at::Tensor& message,
            const codecs::BlockLayout& layout, double scale,
            const std::optional<at::Tensor>& error);
}  // namespace reference

}  // namespace commhook::sign
