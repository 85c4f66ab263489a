// 8-bit floats with a scale for each block: the operators, and their kernels in plain ATen. These
// serve every device; all other kernels give the same bits. torch_commhook/codecs/block_codec.py
// has the codec.
#include "ops/codecs/fp8.h"

#include <ATen/ATen.h>

#include <limits>
#include <vector>

#include "ops/codecs/block_codec_reference.h"
#include "ops/codecs/fp8_math.h"

#ifdef COMMHOOK_X86_KERNELS
#include <immintrin.h>
#endif

namespace commhook::fp8 {

Format Codec::check(const char* op, std::string_view format, int64_t block_size) {
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

struct Kernels {
  static const BlockKernels& on_cpu(const Format& format) {
    return COMMHOOK_CHOOSE(kKernels)[format.is_e5m2 ? 1 : 0];
  }
  static auto quantize(const Format& format, const std::optional<at::Tensor>& /*rounding*/) {
    return [&format](const at::Tensor& values, int64_t, const at::Tensor& error) {
      return quantized(values, format, error);
    };
  }
  static auto restore(const Format& format) {
    return [&format](const codecs::reference::Blocks& blocks, int64_t) {
      const auto q = blocks.codes.contiguous().view(dtype_of(format)).to(at::kFloat);
      return q * blocks.parameters;
    };
  }
};

}  // namespace
}  // namespace commhook::fp8

COMMHOOK_BLOCK_OPERATORS(commhook::fp8::Codec,
                         commhook::codecs::HostKernels<commhook::fp8::Kernels>)
