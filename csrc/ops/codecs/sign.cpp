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

#include <limits>
#include <vector>

#include "ops/codecs/block_codec_reference.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/sign_math.h"

namespace commhook::sign {

codecs::BlockForm Codec::check(const char* op, int64_t block_size) {
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

struct Kernels {
  static const BlockKernels& on_cpu(const codecs::BlockForm& /*format*/) {
    return COMMHOOK_CHOOSE(kKernels);
  }
  static auto quantize(const codecs::BlockForm& /*format*/,
                       const std::optional<at::Tensor>& /*rounding*/) {
    return [](const at::Tensor& values, int64_t, const at::Tensor& error) {
      return quantized(values, error);
    };
  }
  static auto restore(const codecs::BlockForm& /*format*/) { return restored; }
};

}  // namespace
}  // namespace commhook::sign

COMMHOOK_BLOCK_OPERATORS(commhook::sign::Codec,
                         commhook::codecs::HostKernels<commhook::sign::Kernels>)
