// Files that compile the kernels of a codec of blocks include this.
#pragma once

#include "block_launch.h"
#include "block_shards.cuh"

namespace commhook::cuda {

template <typename Block>
void BlockLaunch<Block>::encode(const char* op, at::TensorList tensors, const at::Tensor& message,
                                const codecs::Chunks& chunks, double scale,
                                const std::optional<at::Tensor>& error,
                                const std::optional<at::Tensor>& rounding) {
  encode_blocks<Block>(op, tensors, message, chunks, scale, error, rounding);
}

template <typename Block>
void BlockLaunch<Block>::decode(const char* op, const at::Tensor& message, at::TensorList tensors,
                                const codecs::Chunks& chunks) {
  decode_blocks<Block>(op, message, tensors, chunks);
}

template <typename Block>
void BlockLaunch<Block>::decode_sum(const char* op, const at::Tensor& messages,
                                    at::TensorList tensors, const codecs::BlockLayout& layout,
                                    double scale) {
  decode_sum_blocks<Block>(op, messages, tensors, layout, scale);
}

template <typename Block>
void BlockLaunch<Block>::reduce(const char* op, const at::Tensor& messages,
                                const at::Tensor& message, const codecs::BlockLayout& layout,
                                double scale, const std::optional<at::Tensor>& error,
                                const std::optional<at::Tensor>& rounding) {
  reduce_blocks<Block>(op, messages, message, layout, scale, error, rounding);
}

template <typename Block>
void BlockLaunch<Block>::reduce_shards(const char* op, at::TensorList messages,
                                       const at::Tensor& message, const codecs::BlockLayout& layout,
                                       double scale, const std::optional<at::Tensor>& error,
                                       const std::optional<at::Tensor>& rounding,
                                       const std::optional<at::Tensor>& failed) {
  cuda::reduce_shards<Block>(op, messages, message, layout, scale, error, rounding, failed);
}

}  // namespace commhook::cuda
