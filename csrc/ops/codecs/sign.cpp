// Signs of values, with the mean magnitude of each block: the operators, and their kernels in plain
// ATen. These serve every device; all other kernels give the same bits.
// torch_commhook/codecs/block_codec.py has the codec.
//
// A block of values p is sent as one bit for each value, set if p is negative, and s = sum|p| /
// count in float32: p ~ s or -s. If a block has an infinity or a NaN, s is NaN. The sign of value b
// * width + c is bit b of byte c; a block has `width` bytes. The sum uses 16 lanes, with value i in
// lane i mod 16. The lanes are then added in halves.
#include "ops/codecs/sign.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "ops/codecs/block_codec_cpu.h"
#include "ops/codecs/block_codec_reference.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/sign_math.h"
#include "ops/cpu/capability.h"
#include "ops/mutation.h"

namespace commhook::sign {

codecs::BlockForm check_form(const char* op, int64_t block_size) {
  codecs::check_block_size(op, block_size, 32);
  return {block_size, 1, 1};
}

namespace {

constexpr int64_t kLanes = 16;

// ---- kernels for the CPU -----------------------------------------------------------------------

using codecs::BlockKernels;
using codecs::Encoding;
using codecs::kMaxBlockSize;

#define COMMHOOK_KERNELS "ops/codecs/sign_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

// ---- kernels in plain ATen ---------------------------------------------------------------------

// [blocks, 1]
at::Tensor sums_of_magnitudes(const at::Tensor& p) {
  const int64_t n = p.size(1);
  const int64_t rows = (n + kLanes - 1) / kLanes;
  auto padded = at::zeros({p.size(0), rows * kLanes}, p.options());
  padded.narrow(1, 0, n).copy_(p.abs());
  const auto lanes = padded.view({p.size(0), rows, kLanes});
  auto sum = at::zeros({p.size(0), kLanes}, p.options());
  for (int64_t row = 0; row < rows; ++row) {
    sum = sum + lanes.select(1, row);
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    sum = sum.narrow(1, 0, half) + sum.narrow(1, half, half);
  }
  return sum;
}

codecs::reference::Blocks quantized(const at::Tensor& p, const at::Tensor& error) {
  const int64_t n = p.size(1);
  const int64_t width = (n + 7) / 8;
  const auto sum = sums_of_magnitudes(p);
  const auto lowered = sums_of_magnitudes(p * static_cast<double>(kLowering));
  const auto is_good = lowered.isfinite();
  const auto count = at::full_like(sum, static_cast<double>(n));
  const auto mean = (at::div(lowered, count) / static_cast<double>(kLowering))
                        .clamp_max(static_cast<double>(kLargestFinite));
  const auto magnitude = at::where(sum.isfinite(), at::div(sum, count), mean);
  const auto is_negative = at::signbit(p).logical_and(is_good);
  if (error.defined()) {
    const auto restored = at::where(is_negative, -magnitude, magnitude);
    codecs::reference::keep(at::where(is_good, p - restored, error), error);
  }
  auto padded = at::zeros({p.size(0), 8 * width}, p.options().dtype(at::kByte));
  padded.narrow(1, 0, n).copy_(is_negative);
  auto codes = at::zeros({p.size(0), width}, padded.options());
  for (int64_t b = 0; b < 8; ++b) {
    codes = codes + padded.narrow(1, b * width, width) * (1 << b);
  }
  return {codes,
          at::where(is_good, magnitude, std::numeric_limits<double>::quiet_NaN()).to(at::kFloat)};
}

at::Tensor restored(const codecs::reference::Blocks& blocks, int64_t n) {
  std::vector<at::Tensor> bits;
  for (int64_t b = 0; b < 8; ++b) {
    bits.push_back(blocks.codes.bitwise_and(1 << b).ne(0));
  }
  const auto is_negative = at::cat(bits, 1).narrow(1, 0, n);
  return at::where(is_negative, -blocks.parameters, blocks.parameters);
}

auto quantize() {
  return [](const at::Tensor& values, int64_t, const at::Tensor& error) {
    return quantized(values, error);
  };
}

// ---- the operators -----------------------------------------------------------------------------

void encode(at::TensorList tensors, const at::Tensor& message, int64_t block_size, int64_t shards,
            at::OptionalIntArrayRef sizes, double scale, const std::optional<at::Tensor>& error) {
  const auto form = check_form("sign_encode", block_size);
  const auto chunks =
      codecs::check_encode("sign_encode", tensors, message, form, shards, sizes, error, {});
  if (cpu::serve(message.device())) {
    return codecs::encode_on_cpu(COMMHOOK_CHOOSE(kKernels), tensors, message, chunks, scale, error,
                                 {});
  }
  codecs::reference::encode(tensors, message, chunks, scale, error, quantize());
}

void decode(const at::Tensor& message, at::TensorList tensors, int64_t block_size, int64_t shards,
            at::OptionalIntArrayRef sizes) {
  const auto form = check_form("sign_decode", block_size);
  const auto chunks = codecs::check_decode("sign_decode", message, tensors, form, shards, sizes);
  if (cpu::serve(message.device())) {
    return codecs::decode_on_cpu(COMMHOOK_CHOOSE(kKernels), message, tensors, chunks);
  }
  codecs::reference::decode(message, tensors, chunks, restored);
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, int64_t block_size,
                double scale) {
  const auto form = check_form("sign_decode_sum", block_size);
  const auto layout = codecs::check_decode_sum("sign_decode_sum", messages, tensors, form);
  if (cpu::serve(messages.device())) {
    return codecs::decode_sum_on_cpu(COMMHOOK_CHOOSE(kKernels), messages, tensors, layout, scale);
  }
  codecs::reference::decode_sum(messages, tensors, layout, scale, restored);
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel,
            int64_t block_size, double scale, const std::optional<at::Tensor>& error) {
  const auto form = check_form("sign_reduce", block_size);
  const auto layout =
      codecs::check_reduce("sign_reduce", messages, message, form, numel, error, {});
  if (cpu::serve(message.device())) {
    return codecs::reduce_on_cpu(COMMHOOK_CHOOSE(kKernels), messages, message, layout, scale, error,
                                 {});
  }
  codecs::reference::reduce(messages, message, layout, scale, error, quantize(), restored);
}

void reduce_shards(at::TensorList messages, const at::Tensor& message, int64_t numel,
                   int64_t block_size, double scale, const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& failed) {
  const auto form = check_form("sign_reduce_shards", block_size);
  codecs::check_reduce_shards("sign_reduce_shards", messages, message, form, numel, error, {},
                              failed);
  codecs::reduce_shards(messages, failed, [&](const at::Tensor& rows) {
    reduce(rows, message, numel, block_size, scale, error);
  });
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.codecs.block_codec");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Writes the message of a bucket, or one message for each run of values that `sizes` gives: the
  // signs of float32(value) * scale + error, and the mean magnitude of each block. Writes the new
  // error into `error`.
  m.def(
      "sign_encode(Tensor[] tensors, Tensor(a!) message, *, int block_size, int shards=1, "
      "SymInt[]? sizes=None, float scale=1.0, Tensor(b!)? error=None) -> ()",
      compliant);
  // Writes a message's values into tensors.
  m.def(
      "sign_decode(Tensor message, Tensor(a!)[] tensors, *, int block_size, int shards=1, "
      "SymInt[]? sizes=None) -> ()",
      compliant);
  // Writes scale * (sum of the values of several messages) into tensors.
  m.def(
      "sign_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, int block_size, "
      "float scale=1.0) -> ()",
      compliant);
  // Writes the message of scale * (sum of the values of several messages) + error.
  m.def(
      "sign_reduce(Tensor messages, Tensor(a!) message, int numel, *, int block_size, "
      "float scale=1.0, Tensor(b!)? error=None) -> ()",
      compliant);
  // The same for messages in separate tensors, such as those that other ranks share. Reads and
  // writes nothing if `failed` is not zero.
  m.def(
      "sign_reduce_shards(Tensor[] messages, Tensor(a!) message, int numel, *, int block_size, "
      "float scale=1.0, Tensor(b!)? error=None, Tensor? failed=None) -> ()",
      compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("sign_encode", encode);
  m.impl("sign_decode", decode);
  m.impl("sign_decode_sum", decode_sum);
  m.impl("sign_reduce", reduce);
  m.impl("sign_reduce_shards", reduce_shards);
}

}  // namespace
}  // namespace commhook::sign

COMMHOOK_MUTATING_OPERATOR(commhook, "sign_encode")
COMMHOOK_MUTATING_OPERATOR(commhook, "sign_decode")
COMMHOOK_MUTATING_OPERATOR(commhook, "sign_decode_sum")
COMMHOOK_MUTATING_OPERATOR(commhook, "sign_reduce")
COMMHOOK_MUTATING_OPERATOR(commhook, "sign_reduce_shards")
