// 8-bit floats with a scale for each block: the operators, and their kernels in plain ATen. These
// serve every device; all other kernels give the same bits. torch_commhook/codecs/block_codec.py
// has the codec.
#include "ops/codecs/fp8.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "ops/codecs/block_codec_cpu.h"
#include "ops/codecs/block_codec_reference.h"
#include "ops/codecs/fp8_math.h"
#include "ops/cpu/capability.h"
#include "ops/mutation.h"

#ifdef COMMHOOK_X86_KERNELS
#include <immintrin.h>
#endif

namespace commhook::fp8 {

Format check_format(const char* op, std::string_view format, int64_t block_size) {
  TORCH_CHECK_VALUE(format == "e4m3" || format == "e5m2", op,
                    ": format must be 'e4m3' or 'e5m2', got '", format, "'");
  codecs::check_block_size(op, block_size, 8);
  return {format == "e5m2", {block_size, 8, 1}};
}

namespace {

// ---- kernels for the CPU -----------------------------------------------------------------------

using blockwise::Quantizer;
using codecs::BlockKernels;
using codecs::Encoding;
using codecs::kMaxBlockSize;

#define COMMHOOK_KERNELS "ops/codecs/fp8_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

const BlockKernels& kernels_for(const Format& format) {
  return COMMHOOK_CHOOSE(kKernels)[format.is_e5m2 ? 1 : 0];
}

// ---- kernels in plain ATen ---------------------------------------------------------------------

at::ScalarType dtype_of(const Format& format) {
  return format.is_e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
}

codecs::reference::Blocks quantized(const at::Tensor& p, const Format& format,
                                    const at::Tensor& error) {
  const double largest = format.is_e5m2 ? 57344.0 : 448.0;
  auto range = p.abs().amax(1, /*keepdim=*/true);
  const auto is_good = range.isfinite();
  range = at::where(is_good, range, 0.0);
  // CUDA would multiply by the inverse of a plain number.
  const auto all_largest = at::full_like(range, largest);
  auto step = at::div(range, all_largest);
  const auto narrowing = codecs::reference::narrowing(step, at::zeros_like(step), largest);
  step = step * narrowing;
  const auto lift = at::where(range.lt(0x1p-100), at::full_like(range, 0x1p64), 1.0);
  const auto lifted = range * lift;
  const auto factor = at::where(lifted.gt(0), at::div(all_largest, lifted) * narrowing, 0.0);
  const auto scaled = at::where(is_good, (p * lift * factor).clamp(-largest, largest), 0.0);
  const auto q = scaled.to(dtype_of(format));
  if (error.defined()) {
    codecs::reference::keep(at::where(is_good, p - q.to(at::kFloat) * step, error), error);
  }
  return {q.view(at::kByte),
          at::where(is_good, step, std::numeric_limits<double>::quiet_NaN()).to(at::kFloat)};
}

auto quantize_with(const Format& format) {
  return [&format](const at::Tensor& values, int64_t, const at::Tensor& error) {
    return quantized(values, format, error);
  };
}

auto restore_with(const Format& format) {
  return [&format](const codecs::reference::Blocks& blocks, int64_t) {
    const auto q = blocks.codes.contiguous().view(dtype_of(format)).to(at::kFloat);
    return q * blocks.parameters;
  };
}

// ---- the operators -----------------------------------------------------------------------------

void encode(at::TensorList tensors, const at::Tensor& message, std::string_view format,
            int64_t block_size, int64_t shards, at::OptionalIntArrayRef sizes, double scale,
            const std::optional<at::Tensor>& error) {
  const auto checked = check_format("fp8_encode", format, block_size);
  const auto chunks =
      codecs::check_encode("fp8_encode", tensors, message, checked.form, shards, sizes, error, {});
  if (cpu::serve(message.device())) {
    return codecs::encode_on_cpu(kernels_for(checked), tensors, message, chunks, scale, error, {});
  }
  codecs::reference::encode(tensors, message, chunks, scale, error, quantize_with(checked));
}

void decode(const at::Tensor& message, at::TensorList tensors, std::string_view format,
            int64_t block_size, int64_t shards, at::OptionalIntArrayRef sizes) {
  const auto checked = check_format("fp8_decode", format, block_size);
  const auto chunks =
      codecs::check_decode("fp8_decode", message, tensors, checked.form, shards, sizes);
  if (cpu::serve(message.device())) {
    return codecs::decode_on_cpu(kernels_for(checked), message, tensors, chunks);
  }
  codecs::reference::decode(message, tensors, chunks, restore_with(checked));
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, std::string_view format,
                int64_t block_size, double scale) {
  const auto checked = check_format("fp8_decode_sum", format, block_size);
  const auto layout = codecs::check_decode_sum("fp8_decode_sum", messages, tensors, checked.form);
  if (cpu::serve(messages.device())) {
    return codecs::decode_sum_on_cpu(kernels_for(checked), messages, tensors, layout, scale);
  }
  codecs::reference::decode_sum(messages, tensors, layout, scale, restore_with(checked));
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel,
            std::string_view format, int64_t block_size, double scale,
            const std::optional<at::Tensor>& error) {
  const auto checked = check_format("fp8_reduce", format, block_size);
  const auto layout =
      codecs::check_reduce("fp8_reduce", messages, message, checked.form, numel, error, {});
  if (cpu::serve(message.device())) {
    return codecs::reduce_on_cpu(kernels_for(checked), messages, message, layout, scale, error, {});
  }
  codecs::reference::reduce(messages, message, layout, scale, error, quantize_with(checked),
                            restore_with(checked));
}

void reduce_shards(at::TensorList messages, const at::Tensor& message, int64_t numel,
                   std::string_view format, int64_t block_size, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& failed) {
  const auto checked = check_format("fp8_reduce_shards", format, block_size);
  codecs::check_reduce_shards("fp8_reduce_shards", messages, message, checked.form, numel, error,
                              {}, failed);
  codecs::reduce_shards(messages, failed, [&](const at::Tensor& rows) {
    reduce(rows, message, numel, format, block_size, scale, error);
  });
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.codecs.block_codec");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Writes the message of a bucket, or one message for each run of values that `sizes` gives:
  // float32(value) * scale + error as 8-bit floats, with a scale for each block. Writes the new
  // error into `error`.
  m.def(
      "fp8_encode(Tensor[] tensors, Tensor(a!) message, *, str format, int block_size, "
      "int shards=1, SymInt[]? sizes=None, float scale=1.0, Tensor(b!)? error=None) -> ()",
      compliant);
  // Writes a message's values into tensors.
  m.def(
      "fp8_decode(Tensor message, Tensor(a!)[] tensors, *, str format, int block_size, "
      "int shards=1, SymInt[]? sizes=None) -> ()",
      compliant);
  // Writes scale * (sum of the values of several messages) into tensors.
  m.def(
      "fp8_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, str format, int block_size, "
      "float scale=1.0) -> ()",
      compliant);
  // Writes the message of scale * (sum of the values of several messages) + error.
  m.def(
      "fp8_reduce(Tensor messages, Tensor(a!) message, int numel, *, str format, int block_size, "
      "float scale=1.0, Tensor(b!)? error=None) -> ()",
      compliant);
  // The same for messages in separate tensors, such as those that other ranks share. Reads and
  // writes nothing if `failed` is not zero.
  m.def(
      "fp8_reduce_shards(Tensor[] messages, Tensor(a!) message, int numel, *, str format, int "
      "block_size, "
      "float scale=1.0, Tensor(b!)? error=None, Tensor? failed=None) -> ()",
      compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("fp8_encode", encode);
  m.impl("fp8_decode", decode);
  m.impl("fp8_decode_sum", decode_sum);
  m.impl("fp8_reduce", reduce);
  m.impl("fp8_reduce_shards", reduce_shards);
}

}  // namespace
}  // namespace commhook::fp8

COMMHOOK_MUTATING_OPERATOR(commhook, "fp8_encode")
COMMHOOK_MUTATING_OPERATOR(commhook, "fp8_decode")
COMMHOOK_MUTATING_OPERATOR(commhook, "fp8_decode_sum")
COMMHOOK_MUTATING_OPERATOR(commhook, "fp8_reduce")
COMMHOOK_MUTATING_OPERATOR(commhook, "fp8_reduce_shards")
