// The launchers of block quantisation. Files that compile its kernels include this.
#pragma once

#include "block_shards.cuh"
#include "blockwise_launch.h"

namespace commhook::cuda {

template <typename Codec>
void BlockwiseLaunch<Codec>::encode(at::TensorList tensors, const at::Tensor& message,
                                    const codecs::Chunks& chunks, double scale,
                                    const std::optional<at::Tensor>& error,
                                    const std::optional<at::Tensor>& rounding) {
  encode_blocks<Codec>("blockwise_encode", tensors, message, chunks, scale, error, rounding);
}

template <typename Codec>
void BlockwiseLaunch<Codec>::decode(const at::Tensor& message, at::TensorList tensors,
                                    const codecs::Chunks& chunks) {
  decode_blocks<Codec>("blockwise_decode", message, tensors, chunks);
}

template <typename Codec>
void BlockwiseLaunch<Codec>::decode_sum(const at::Tensor& messages, at::TensorList tensors,
                                        const codecs::BlockLayout& layout, double scale) {
  decode_sum_blocks<Codec>("blockwise_decode_sum", messages, tensors, layout, scale);
}

template <typename Codec>
void BlockwiseLaunch<Codec>::reduce(const at::Tensor& messages, const at::Tensor& message,
                                    const codecs::BlockLayout& layout, double scale,
                                    const std::optional<at::Tensor>& error,
                                    const std::optional<at::Tensor>& rounding) {
  reduce_blocks<Codec>("blockwise_reduce", messages, message, layout, scale, error, rounding);
}

template <typename Codec>
void BlockwiseLaunch<Codec>::reduce_shards(at::TensorList messages, const at::Tensor& message,
                                           const codecs::BlockLayout& layout, double scale,
                                           const std::optional<at::Tensor>& error,
                                           const std::optional<at::Tensor>& rounding,
                                           const std::optional<at::Tensor>& failed) {
  cuda::reduce_shards<Codec>("blockwise_reduce_shards", messages, message, layout, scale, error,
                             rounding, failed);
}

}  // namespace commhook::cuda
