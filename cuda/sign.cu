// Signs of values, on CUDA.
#include <torch/library.h>

#include "block_shards.cuh"
#include "ops/codecs/sign.h"
#include "sign_block.h"

namespace commhook::cuda {
namespace {

void encode(at::TensorList tensors, const at::Tensor& message, int64_t block_size, int64_t shards,
            at::OptionalIntArrayRef sizes, double scale, const std::optional<at::Tensor>& error) {
  const auto form = sign::check_form("sign_encode", block_size);
  const auto chunks =
      codecs::check_encode("sign_encode", tensors, message, form, shards, sizes, error, {});
  encode_blocks<SignBlock>("sign_encode", tensors, message, chunks, scale, error, {});
}

void decode(const at::Tensor& message, at::TensorList tensors, int64_t block_size, int64_t shards,
            at::OptionalIntArrayRef sizes) {
  const auto form = sign::check_form("sign_decode", block_size);
  const auto chunks = codecs::check_decode("sign_decode", message, tensors, form, shards, sizes);
  decode_blocks<SignBlock>("sign_decode", message, tensors, chunks);
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, int64_t block_size,
                double scale) {
  const auto form = sign::check_form("sign_decode_sum", block_size);
  const auto layout = codecs::check_decode_sum("sign_decode_sum", messages, tensors, form);
  decode_sum_blocks<SignBlock>("sign_decode_sum", messages, tensors, layout, scale);
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel,
            int64_t block_size, double scale, const std::optional<at::Tensor>& error) {
  const auto form = sign::check_form("sign_reduce", block_size);
  const auto layout =
      codecs::check_reduce("sign_reduce", messages, message, form, numel, error, {});
  reduce_blocks<SignBlock>("sign_reduce", messages, message, layout, scale, error, {});
}

void reduce_shards(at::TensorList messages, const at::Tensor& message, int64_t numel,
                   int64_t block_size, double scale, const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& failed) {
  const auto form = sign::check_form("sign_reduce_shards", block_size);
  const auto layout = codecs::check_reduce_shards("sign_reduce_shards", messages, message, form,
                                                  numel, error, {}, failed);
  cuda::reduce_shards<SignBlock>("sign_reduce_shards", messages, message, layout, scale, error, {},
                                 failed);
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("sign_encode", encode);
  m.impl("sign_decode", decode);
  m.impl("sign_decode_sum", decode_sum);
  m.impl("sign_reduce", reduce);
  m.impl("sign_reduce_shards", reduce_shards);
}

}  // namespace
}  // namespace commhook::cuda
