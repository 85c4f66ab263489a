// Declares the launchers of block quantisation. For each number of bits, one file compiles the
// codecs (blockwise_2.cu, blockwise_4.cu, blockwise_8.cu).
#pragma once

#include <ATen/core/Tensor.h>

#include "blockwise_block.h"
#include "ops/codecs/block_chunks.h"

namespace commhook::cuda {

// Arguments are already checked. chunks, layout: for the codec's form.
template <typename Codec>
struct BlockwiseLaunch {
  static void encode(at::TensorList tensors, const at::Tensor& message,
                     const codecs::Chunks& chunks, double scale,
                     const std::optional<at::Tensor>& error,
                     const std::optional<at::Tensor>& rounding);
  static void decode(const at::Tensor& message, at::TensorList tensors,
                     const codecs::Chunks& chunks);
  static void decode_sum(const at::Tensor& messages, at::TensorList tensors,
                         const codecs::BlockLayout& layout, double scale);
  static void reduce(const at::Tensor& messages, const at::Tensor& message,
                     const codecs::BlockLayout& layout, double scale,
                     const std::optional<at::Tensor>& error,
                     const std::optional<at::Tensor>& rounding);
  static void reduce_shards(at::TensorList messages, const at::Tensor& message,
                            const codecs::BlockLayout& layout, double scale,
                            const std::optional<at::Tensor>& error,
                            const std::optional<at::Tensor>& rounding,
                            const std::optional<at::Tensor>& failed);
};

}  // namespace commhook::cuda
