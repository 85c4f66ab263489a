// 8-bit floats with a scale for each block on the CPU.
#include <torch/library.h>

#include "ops/codecs/block_codec_cpu.h"
#include "ops/codecs/fp8.h"
#include "ops/codecs/fp8_math.h"
#include "ops/cpu/capability.h"

namespace commhook::cpu {
namespace {

using blockwise::Quantizer;
using codecs::BlockKernels;
using codecs::Encoding;
using codecs::kMaxBlockSize;
using fp8::round_to;
using fp8::Traits;
using fp8::value_of;

#define COMMHOOK_KERNELS "ops/codecs/fp8_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

const BlockKernels& kernels_for(const fp8::Format& format) {
  return COMMHOOK_CHOOSE(kKernels)[format.is_e5m2 ? 1 : 0];
}

void fp8_encode(at::TensorList tensors, const at::Tensor& message, std::string_view format,
                int64_t block_size, int64_t shards, double scale,
                const std::optional<at::Tensor>& error) {
  const auto checked = fp8::check_format("fp8_encode", format, block_size);
  const auto layout =
      codecs::check_encode("fp8_encode", tensors, message, checked.form, shards, error, {});
  if (capability() == Capability::kReference) {
    return fp8::reference::encode(tensors, message, checked, layout, scale, error);
  }
  codecs::encode_on_cpu(kernels_for(checked), tensors, message, layout, scale, error, {});
}

void fp8_decode(const at::Tensor& message, at::TensorList tensors, std::string_view format,
                int64_t block_size, int64_t shards) {
  const auto checked = fp8::check_format("fp8_decode", format, block_size);
  const auto layout = codecs::check_decode("fp8_decode", message, tensors, checked.form, shards);
  if (capability() == Capability::kReference) {
    return fp8::reference::decode(message, tensors, checked, layout);
  }
  codecs::decode_on_cpu(kernels_for(checked), message, tensors, layout);
}

void fp8_reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel,
                std::string_view format, int64_t block_size, double scale,
                const std::optional<at::Tensor>& error) {
  const auto checked = fp8::check_format("fp8_reduce", format, block_size);
  const auto layout =
      codecs::check_reduce("fp8_reduce", messages, message, checked.form, numel, error, {});
  if (capability() == Capability::kReference) {
    return fp8::reference::reduce(messages, message, checked, layout, scale, error);
  }
  codecs::reduce_on_cpu(kernels_for(checked), messages, message, layout, scale, error, {});
}

TORCH_LIBRARY_IMPL(commhook, CPU, m) {
  m.impl("fp8_encode", fp8_encode);
  m.impl("fp8_decode", fp8_decode);
  m.impl("fp8_reduce", fp8_reduce);
}

}  // namespace
}  // namespace commhook::cpu
