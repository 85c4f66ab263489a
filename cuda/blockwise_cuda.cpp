// Block quantisation on CUDA.
#include <torch/library.h>

#include "blockwise_launch.h"
#include "ops/codecs/block_codec.h"
#include "ops/codecs/blockwise.h"

namespace commhook::cuda {
namespace {

template <int kBits, bool kSymmetric>
using Launch = BlockwiseLaunch<BlockwiseBlock<kBits, kSymmetric>>;

// Calls call(launch) with the launchers of a format.
template <typename Call>
void with_launch(const blockwise::Format& format, const Call& call) {
  if (format.bits == 8) {
    format.is_symmetric ? call(Launch<8, true>{}) : call(Launch<8, false>{});
  } else if (format.bits == 4) {
    format.is_symmetric ? call(Launch<4, true>{}) : call(Launch<4, false>{});
  } else {
    format.is_symmetric ? call(Launch<2, true>{}) : call(Launch<2, false>{});
  }
}

void encode(at::TensorList tensors, const at::Tensor& message, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards, at::OptionalIntArrayRef sizes, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  const auto format = blockwise::check_format("blockwise_encode", bits, block_size, symmetric);
  const auto chunks = codecs::check_encode("blockwise_encode", tensors, message, format.form(),
                                           shards, sizes, error, rounding);
  with_launch(format, [&](auto launch) {
    launch.encode(tensors, message, chunks, scale, error, rounding);
  });
}

void decode(const at::Tensor& message, at::TensorList tensors, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards, at::OptionalIntArrayRef sizes) {
  const auto format = blockwise::check_format("blockwise_decode", bits, block_size, symmetric);
  const auto chunks =
      codecs::check_decode("blockwise_decode", message, tensors, format.form(), shards, sizes);
  with_launch(format, [&](auto launch) { launch.decode(message, tensors, chunks); });
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, int64_t bits,
                int64_t block_size, bool symmetric, double scale) {
  const auto format = blockwise::check_format("blockwise_decode_sum", bits, block_size, symmetric);
  const auto layout =
      codecs::check_decode_sum("blockwise_decode_sum", messages, tensors, format.form());
  with_launch(format, [&](auto launch) { launch.decode_sum(messages, tensors, layout, scale); });
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel, int64_t bits,
            int64_t block_size, bool symmetric, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  const auto format = blockwise::check_format("blockwise_reduce", bits, block_size, symmetric);
  const auto layout = codecs::check_reduce("blockwise_reduce", messages, message, format.form(),
                                           numel, error, rounding);
  with_launch(format, [&](auto launch) {
    launch.reduce(messages, message, layout, scale, error, rounding);
  });
}

void reduce_shards(at::TensorList messages, const at::Tensor& message, int64_t numel, int64_t bits,
                   int64_t block_size, bool symmetric, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding,
                   const std::optional<at::Tensor>& failed) {
  const auto format =
      blockwise::check_format("blockwise_reduce_shards", bits, block_size, symmetric);
  const auto layout = codecs::check_reduce_shards("blockwise_reduce_shards", messages, message,
                                                  format.form(), numel, error, rounding, failed);
  with_launch(format, [&](auto launch) {
    launch.reduce_shards(messages, message, layout, scale, error, rounding, failed);
  });
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("blockwise_encode", encode);
  m.impl("blockwise_decode", decode);
  m.impl("blockwise_decode_sum", decode_sum);
  m.impl("blockwise_reduce", reduce);
  m.impl("blockwise_reduce_shards", reduce_shards);
}

}  // namespace
}  // namespace commhook::cuda
