// Launches the kernels of a codec of blocks. A file of each codec compiles them; block quantisation
// has one for each number of bits (blockwise_2.cu, blockwise_4.cu, blockwise_8.cu).
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/codecs/block_chunks.h"

namespace commhook::cuda {

// Block: the arithmetic of one format, such as SignBlock. Arguments are already checked. chunks,
// layout: for the format. op: the operator's name, for errors.
template <typename Block>
struct BlockLaunch {
  static void encode(const char* op, at::TensorList tensors, const at::Tensor& message,
                     const codecs::Chunks& chunks, double scale,
                     const std::optional<at::Tensor>& error,
                     const std::optional<at::Tensor>& rounding);
  static void decode(const char* op, const at::Tensor& message, at::TensorList tensors,
                     const codecs::Chunks& chunks);
  static void decode_sum(const char* op, const at::Tensor& messages, at::TensorList tensors,
                         const codecs::BlockLayout& layout, double scale);
  static void reduce(const char* op, const at::Tensor& messages, const at::Tensor& message,
                     const codecs::BlockLayout& layout, double scale,
                     const std::optional<at::Tensor>& error,
                     const std::optional<at::Tensor>& rounding);
  static void reduce_shards(const char* op, at::TensorList messages, const at::Tensor& message,
                            const codecs::BlockLayout& layout, double scale,
                            const std::optional<at::Tensor>& error,
                            const std::optional<at::Tensor>& rounding,
                            const std::optional<at::Tensor>& failed);
};

// Kernels for codecs::BlockOperators. Formats::with_launch(format, call) calls call(launch) with
// the BlockLaunch of a format.
template <typename Formats>
struct CudaKernels {
  template <typename Format, typename... Arguments>
  static void encode(const char* op, const Format& format, const Arguments&... arguments) {
    Formats::with_launch(format, [&](auto launch) { launch.encode(op, arguments...); });
  }
  template <typename Format, typename... Arguments>
  static void decode(const char* op, const Format& format, const Arguments&... arguments) {
    Formats::with_launch(format, [&](auto launch) { launch.decode(op, arguments...); });
  }
  template <typename Format, typename... Arguments>
  static void decode_sum(const char* op, const Format& format, const Arguments&... arguments) {
    Formats::with_launch(format, [&](auto launch) { launch.decode_sum(op, arguments...); });
  }
  template <typename Format, typename... Arguments>
  static void reduce(const char* op, const Format& format, const Arguments&... arguments) {
    Formats::with_launch(format, [&](auto launch) { launch.reduce(op, arguments...); });
  }
  template <typename Format, typename... Arguments>
  static void reduce_shards(const char* op, const Format& format, const Arguments&... arguments) {
    Formats::with_launch(format, [&](auto launch) { launch.reduce_shards(op, arguments...); });
  }
};

}  // namespace commhook::cuda
