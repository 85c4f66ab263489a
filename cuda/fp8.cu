// 8-bit floats with a scale for each block, on CUDA.
#include <torch/library.h>

#include "block_shards.cuh"
#include "fp8_block.h"
#include "ops/codecs/fp8.h"

namespace commhook::cuda {
namespace {

// Calls call(codec) with the codec of a format.
template <typename Call>
void with_codec(const fp8::Format& format, const Call& call) {
  format.is_e5m2 ? call(Fp8Block<true>{}) : call(Fp8Block<false>{});
}

void encode(at::TensorList tensors, const at::Tensor& message, std::string_view format,
            int64_t block_size, int64_t shards, at::OptionalIntArrayRef sizes, double scale,
            const std::optional<at::Tensor>& error) {
  const auto checked = fp8::check_format("fp8_encode", format, block_size);
  const auto chunks =
      codecs::check_encode("fp8_encode", tensors, message, checked.form, shards, sizes, error, {});
  with_codec(checked, [&](auto codec) {
    encode_blocks<decltype(codec)>("fp8_encode", tensors, message, chunks, scale, error, {});
  });
}

void decode(const at::Tensor& message, at::TensorList tensors, std::string_view format,
            int64_t block_size, int64_t shards, at::OptionalIntArrayRef sizes) {
  const auto checked = fp8::check_format("fp8_decode", format, block_size);
  const auto chunks =
      codecs::check_decode("fp8_decode", message, tensors, checked.form, shards, sizes);
  with_codec(checked, [&](auto codec) {
    decode_blocks<decltype(codec)>("fp8_decode", message, tensors, chunks);
  });
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, std::string_view format,
                int64_t block_size, double scale) {
  const auto checked = fp8::check_format("fp8_decode_sum", format, block_size);
  const auto layout = codecs::check_decode_sum("fp8_decode_sum", messages, tensors, checked.form);
  with_codec(checked, [&](auto codec) {
    decode_sum_blocks<decltype(codec)>("fp8_decode_sum", messages, tensors, layout, scale);
  });
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel,
            std::string_view format, int64_t block_size, double scale,
            const std::optional<at::Tensor>& error) {
  const auto checked = fp8::check_format("fp8_reduce", format, block_size);
  const auto layout =
      codecs::check_reduce("fp8_reduce", messages, message, checked.form, numel, error, {});
  with_codec(checked, [&](auto codec) {
    reduce_blocks<decltype(codec)>("fp8_reduce", messages, message, layout, scale, error, {});
  });
}

void reduce_shards(at::TensorList messages, const at::Tensor& message, int64_t numel,
                   std::string_view format, int64_t block_size, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& failed) {
  const auto checked = fp8::check_format("fp8_reduce_shards", format, block_size);
  const auto layout = codecs::check_reduce_shards("fp8_reduce_shards", messages, message,
                                                  checked.form, numel, error, {}, failed);
  with_codec(checked, [&](auto codec) {
    cuda::reduce_shards<decltype(codec)>("fp8_reduce_shards", messages, message, layout, scale,
                                         error, {}, failed);
  });
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("fp8_encode", encode);
  m.impl("fp8_decode", decode);
  m.impl("fp8_decode_sum", decode_sum);
  m.impl("fp8_reduce", reduce);
  m.impl("fp8_reduce_shards", reduce_shards);
}

}  // namespace
}  // namespace commhook::cuda
