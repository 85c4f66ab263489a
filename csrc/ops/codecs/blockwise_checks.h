// What the kernels of block quantisation check, and where they then find what.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/codecs/blockwise.h"

namespace commhook::blockwise {

struct Arguments {
  Layout layout;
  int64_t numel;
  int64_t shards;
};

// Each throws an error that names the operator, the argument, its contract and the value.

// tensors: as flatten takes them. message: contiguous bytes, as many as the layout has. error: flat
// float32, as many as the tensors have; none is taken as well. rounding: two int64, seed and step;
// none is to the nearest. All on one device, with no memory shared.
Arguments check_encode(at::TensorList tensors, const at::Tensor& message, const Format& format,
                       int64_t shards, const std::optional<at::Tensor>& error,
                       const std::optional<at::Tensor>& rounding);
// tensors: as unflatten_into takes them.
Arguments check_decode(const at::Tensor& message, at::TensorList tensors, const Format& format,
                       int64_t shards);
// messages: [messages, bytes of one of `numel` values in one shard]. message: one such.
Arguments check_reduce(const at::Tensor& messages, const at::Tensor& message, const Format& format,
                       int64_t numel, const std::optional<at::Tensor>& error,
                       const std::optional<at::Tensor>& rounding);
Format check_format(const char* op, int64_t bits, int64_t block_size, bool is_symmetric);

// What it says, for a tensor on the CPU.
Rounding rounding_of(const std::optional<at::Tensor>& rounding);

// The kernels in plain ATen.
namespace reference {
void encode(at::TensorList tensors, const at::Tensor& message, const Arguments& arguments,
            double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding);
void decode(const at::Tensor& message, at::TensorList tensors, const Arguments& arguments);
void reduce(const at::Tensor& messages, const at::Tensor& message, const Arguments& arguments,
            double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding);
}  // namespace reference

}  // namespace commhook::blockwise
