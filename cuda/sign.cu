// Signs of values, on CUDA.
#include <torch/library.h>

#include "block_launch.cuh"
#include "ops/codecs/sign.h"
#include "sign_block.h"

namespace commhook::cuda {
namespace {

struct SignFormats {
  template <typename Call>
  static void with_launch(const codecs::BlockForm& /*format*/, const Call& call) {
    call(BlockLaunch<SignBlock>{});
  }
};

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  codecs::implement_operators<sign::Codec, CudaKernels<SignFormats>>(m);
}

}  // namespace
}  // namespace commhook::cuda
