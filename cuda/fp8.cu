// 8-bit floats with a scale for each block, on CUDA.
#include <torch/library.h>

#include "block_launch.cuh"
#include "fp8_block.h"
#include "ops/codecs/fp8.h"

namespace commhook::cuda {
namespace {

struct Fp8Formats {
  template <typename Call>
  static void with_launch(const fp8::Format& format, const Call& call) {
    format.is_e5m2 ? call(BlockLaunch<Fp8Block<true>>{}) : call(BlockLaunch<Fp8Block<false>>{});
  }
};

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  codecs::implement_operators<fp8::Codec, CudaKernels<Fp8Formats>>(m);
}

}  // namespace
}  // namespace commhook::cuda
