// Signs of values on the CPU.
#include <torch/library.h>

#include "ops/codecs/block_codec_cpu.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/sign.h"
#include "ops/cpu/capability.h"

namespace commhook::cpu {
namespace {

using codecs::BlockKernels;
using codecs::Encoding;
using codecs::kMaxBlockSize;
using sign::kLanes;

#define COMMHOOK_KERNELS "ops/codecs/sign_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

void sign_encode(at::TensorList tensors, const at::Tensor& message, int64_t block_size,
                 int64_t shards, double scale, const std::optional<at::Tensor>& error) {
  const auto form = sign::check_form("sign_encode", block_size);
  const auto layout =
      codecs::check_encode("sign_encode", tensors, message, form, shards, error, {});
  if (capability() == Capability::kReference) {
    return sign::reference::encode(tensors, message, layout, scale, error);
  }
  codecs::encode_on_cpu(COMMHOOK_CHOOSE(kKernels), tensors, message, layout, scale, error, {});
}

void sign_decode(const at::Tensor& message, at::TensorList tensors, int64_t block_size,
                 int64_t shards) {
  const auto form = sign::check_form("sign_decode", block_size);
  const auto layout = codecs::check_decode("sign_decode", message, tensors, form, shards);
  if (capability() == Capability::kReference) {
    return sign::reference::decode(message, tensors, layout);
  }
  codecs::decode_on_cpu(COMMHOOK_CHOOSE(kKernels), message, tensors, layout);
}

void sign_reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel,
                 int64_t block_size, double scale, const std::optional<at::Tensor>& error) {
  const auto form = sign::check_form("sign_reduce", block_size);
  const auto layout =
      codecs::check_reduce("sign_reduce", messages, message, form, numel, error, {});
  if (capability() == Capability::kReference) {
    return sign::reference::reduce(messages, message, layout, scale, error);
  }
  codecs::reduce_on_cpu(COMMHOOK_CHOOSE(kKernels), messages, message, layout, scale, error, {});
}

TORCH_LIBRARY_IMPL(commhook, CPU, m) {
  m.impl("sign_encode", sign_encode);
  m.impl("sign_decode", sign_decode);
  m.impl("sign_reduce", sign_reduce);
}

}  // namespace
}  // namespace commhook::cpu
