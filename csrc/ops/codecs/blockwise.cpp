// Block quantisation: its operators, and their kernels in plain ATen. These serve every device; all
// other kernels give the same bits. torch_commhook/codecs/block_codec.py has the codec.
#include "ops/codecs/blockwise.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/codecs/block_codec_reference.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/philox.h"

#ifdef COMMHOOK_X86_KERNELS
#include <immintrin.h>
#endif

namespace commhook::blockwise {

Format Codec::check(const char* op, int64_t bits, int64_t block_size, bool is_symmetric) {
  TORCH_CHECK_VALUE(bits == 2 || bits == 4 || bits == 8, op, ": bits must be 2, 4 or 8, got ",
                    bits);
  codecs::check_block_size(op, block_size, bits == 2 ? 16 : 8);
  return {bits, block_size, is_symmetric};
}

namespace {

// ---- kernels for the CPU -----------------------------------------------------------------------

using codecs::BlockKernels;
using codecs::Encoding;
using codecs::kMaxBlockSize;
using codecs::Rounding;

#define COMMHOOK_KERNELS "ops/codecs/blockwise_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

// ---- kernels in plain ATen ---------------------------------------------------------------------

// Packs [blocks, values] of one byte each into [blocks, bytes]. The code of value k * width + c is
// in byte c, at bit k * bits; a block has `width` bytes.
at::Tensor packed(const at::Tensor& codes, const Format& format) {
  const int64_t n = codes.size(1);
  const int64_t width = format.form().code_bytes(n);
  auto bytes = at::zeros({codes.size(0), width}, codes.options());
  for (int64_t k = 0; k * width < n; ++k) {
    const int64_t count = std::min(width, n - k * width);
    auto part = bytes.narrow(1, 0, count);
    const auto own = codes.narrow(1, k * width, count).bitwise_and((1 << format.bits) - 1);
    part.bitwise_or_(at::bitwise_left_shift(own, at::full_like(own, k * format.bits)));
  }
  return bytes;
}

at::Tensor unpacked(const at::Tensor& bytes, const Format& format, int64_t n) {
  std::vector<at::Tensor> parts;
  for (int64_t k = 0; k < 8 / format.bits; ++k) {
    const auto shifted = at::bitwise_right_shift(bytes, at::full_like(bytes, k * format.bits));
    parts.push_back(shifted.bitwise_and((1 << format.bits) - 1));
  }
  auto integers = at::cat(parts, 1).narrow(1, 0, n).to(at::kInt);
  if (format.is_symmetric) {
    const int64_t sign = 1 << (format.bits - 1);
    integers = integers.bitwise_xor(sign) - sign;
  }
  return integers.to(at::kFloat);
}

at::Tensor divided(const at::Tensor& numerator, const at::Tensor& denominator) {
  return at::div(numerator, denominator);  // CUDA would multiply by the inverse of a plain number
}

// fitted_step() in ATen, for finite p: [blocks, values] and [blocks, 1].
at::Tensor fitted(const at::Tensor& p, const at::Tensor& range) {
  const auto whole = static_cast<double>(kWhole);
  const auto units = [&](const at::Tensor& values) {
    return (values + whole - whole).to(at::kLong);
  };
  const auto largest = range.clamp_min(0x1p-109);
  const auto factor = divided(at::full_like(range, static_cast<double>(kUnits)), largest);
  const auto magnitudes = units(p.abs() * factor);
  const auto mean =
      divided(magnitudes.sum(1, /*keepdim=*/true).to(at::kFloat) * static_cast<double>(kThreshold),
              at::full_like(range, static_cast<double>(p.size(1))));
  const auto is_larger = magnitudes.gt(units(mean));
  const auto count = is_larger.sum(1, /*keepdim=*/true).to(at::kFloat);
  const auto sum = (magnitudes * is_larger).sum(1, /*keepdim=*/true).to(at::kFloat);
  const auto step = largest * (divided(sum, count) * static_cast<double>(1.0f / kUnits));
  return at::where(count.gt(0).logical_and(step.lt(range)), step, range);
}

// p: [blocks, values]. Writes the new error into `error`, of the same shape, if that is defined.
codecs::reference::Blocks quantized(const at::Tensor& p, const Format& format,
                                    const at::Tensor& dithers, const at::Tensor& error) {
  const auto levels = static_cast<double>((1 << (format.bits - (format.is_symmetric ? 1 : 0))) - 1);
  auto range = p.abs().amax(1, /*keepdim=*/true);
  auto is_good = range.isfinite();
  auto low = at::zeros_like(range);
  if (!format.is_symmetric) {
    low = p.amin(1, /*keepdim=*/true).add(0.0);  // no zero has a sign
    range = (p.amax(1, /*keepdim=*/true) - low).add(0.0);
    is_good = is_good.logical_and(range.isfinite());
  }
  range = at::where(is_good, range, 0.0);
  const bool is_fitted = format.is_fitted(dithers.defined());
  if (is_fitted) {
    range = fitted(at::where(is_good, p, 0.0), range);
  }
  const auto all_levels = at::full_like(range, levels);
  auto step = divided(range, all_levels);
  const auto narrowing = codecs::reference::narrowing(step, low, levels);
  step = step * narrowing;
  const auto is_small = range.gt(0).logical_and(range.lt(0x1p-100));
  const auto lift = at::where(is_small, at::full_like(range, 0x1p64), 1.0);
  const auto lifted = range * lift;
  const auto factor = at::where(lifted.gt(0), divided(all_levels, lifted) * narrowing, 0.0);
  auto t = (p * lift - low * lift) * factor;
  if (dithers.defined()) {
    t = (t + dithers).clamp_max(levels);
  } else if (is_fitted) {
    t = t.clamp(-levels, levels);
  }
  const auto q = t.round();
  if (error.defined()) {
    const auto restored = format.is_symmetric ? q * step : low + q * step;
    codecs::reference::keep(at::where(is_good, p - restored, error), error);
  }
  auto parameters = at::where(is_good, step, std::numeric_limits<double>::quiet_NaN());
  if (!format.is_symmetric) {
    parameters =
        at::cat({parameters, at::where(is_good, low, std::numeric_limits<double>::quiet_NaN())}, 1);
  }
  const auto integers = at::where(is_good, q, 0.0).to(at::kInt).bitwise_and(255).to(at::kByte);
  return {packed(integers, format), parameters.to(at::kFloat)};
}

// The random numbers of blocks [first, first + count), for n values each.
at::Tensor dithers_of(const codecs::Rounding& rounding, int64_t first, int64_t count, int64_t n,
                      at::Device device) {
  if (!rounding.is_random) {
    return {};
  }
  const int64_t counters = (n + 7) / 8;
  auto dithers = at::empty({count, 8, counters}, at::kFloat);
  auto* to = dithers.mutable_data_ptr<float>();
  for (int64_t b = 0; b < count; ++b) {
    const auto block = static_cast<uint64_t>(first + b);
    for (int64_t c = 0; c < counters; ++c) {
      uint32_t words[4] = {static_cast<uint32_t>(c), static_cast<uint32_t>(block),
                           static_cast<uint32_t>(block >> 32), rounding.step};
      philox(words[0], words[1], words[2], words[3], rounding.seed0, rounding.seed1);
      for (int64_t k = 0; k < 8; ++k) {
        to[(b * 8 + k) * counters + c] = dither((words[k / 2] >> (16 * (k % 2))) & 0xffffu);
      }
    }
  }
  return dithers.view({count, 8 * counters}).narrow(1, 0, n).to(device);
}

struct Kernels {
  static const BlockKernels& on_cpu(const Format& format) {
    return COMMHOOK_CHOOSE(kKernels)[format.bits / 4][format.is_symmetric ? 1 : 0];
  }
  static auto quantize(const Format& format, const std::optional<at::Tensor>& rounding) {
    return [&format, drawn = codecs::reference::rounding_on_host(rounding)](
               const at::Tensor& values, int64_t block, const at::Tensor& error) {
      const auto dithers =
          dithers_of(drawn, block, values.size(0), values.size(1), values.device());
      return quantized(values, format, dithers, error);
    };
  }
  static auto restore(const Format& format) {
    return [&format](const codecs::reference::Blocks& blocks, int64_t n) {
      const auto scaled = unpacked(blocks.codes, format, n) * blocks.parameters.narrow(1, 0, 1);
      return format.is_symmetric ? scaled : blocks.parameters.narrow(1, 1, 1) + scaled;
    };
  }
};

}  // namespace
}  // namespace commhook::blockwise

COMMHOOK_BLOCK_OPERATORS(commhook::blockwise::Codec,
                         commhook::codecs::HostKernels<commhook::blockwise::Kernels>)
