// Block quantisation on the CPU.
#include <torch/library.h>

#include "ops/codecs/block_codec_cpu.h"
#include "ops/codecs/blockwise.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/philox.h"
#include "ops/cpu/capability.h"

namespace commhook::cpu {
namespace {

using namespace blockwise;  // NOLINT: the kernels' own names
using codecs::BlockKernels;
using codecs::Encoding;
using codecs::kMaxBlockSize;
using codecs::Rounding;

#define COMMHOOK_KERNELS "ops/codecs/blockwise_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

const BlockKernels& kernels_for(const Format& format) {
  return COMMHOOK_CHOOSE(kKernels)[format.bits == 8 ? 1 : 0][format.is_symmetric ? 1 : 0];
}

void encode(at::TensorList tensors, const at::Tensor& message, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards, double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding) {
  const auto format = check_format("blockwise_encode", bits, block_size, symmetric);
  const auto layout = codecs::check_encode("blockwise_encode", tensors, message, format.form(),
                                           shards, error, rounding);
  if (capability() == Capability::kReference) {
    return blockwise::reference::encode(tensors, message, format, layout, scale, error, rounding);
  }
  codecs::encode_on_cpu(kernels_for(format), tensors, message, layout, scale, error, rounding);
}

void decode(const at::Tensor& message, at::TensorList tensors, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards) {
  const auto format = check_format("blockwise_decode", bits, block_size, symmetric);
  const auto layout =
      codecs::check_decode("blockwise_decode", message, tensors, format.form(), shards);
  if (capability() == Capability::kReference) {
    return blockwise::reference::decode(message, tensors, format, layout);
  }
  codecs::decode_on_cpu(kernels_for(format), message, tensors, layout);
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel, int64_t bits,
            int64_t block_size, bool symmetric, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  const auto format = check_format("blockwise_reduce", bits, block_size, symmetric);
  const auto layout = codecs::check_reduce("blockwise_reduce", messages, message, format.form(),
                                           numel, error, rounding);
  if (capability() == Capability::kReference) {
    return blockwise::reference::reduce(messages, message, format, layout, scale, error, rounding);
  }
  codecs::reduce_on_cpu(kernels_for(format), messages, message, layout, scale, error, rounding);
}

TORCH_LIBRARY_IMPL(commhook, CPU, m) {
  m.impl("blockwise_encode", encode);
  m.impl("blockwise_decode", decode);
  m.impl("blockwise_reduce", reduce);
}

}  // namespace
}  // namespace commhook::cpu
