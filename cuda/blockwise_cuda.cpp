// Block quantisation on CUDA.
#include <torch/library.h>

#include "block_launch.h"
#include "blockwise_block.h"
#include "ops/codecs/blockwise.h"

namespace commhook::cuda {
namespace {

template <int kBits, bool kSymmetric>
using Launch = BlockLaunch<BlockwiseBlock<kBits, kSymmetric>>;

struct BlockwiseFormats {
  template <typename Call>
  static void with_launch(const blockwise::Format& format, const Call& call) {
    if (format.bits == 8) {
      format.is_symmetric ? call(Launch<8, true>{}) : call(Launch<8, false>{});
    } else if (format.bits == 4) {
      format.is_symmetric ? call(Launch<4, true>{}) : call(Launch<4, false>{});
    } else {
      format.is_symmetric ? call(Launch<2, true>{}) : call(Launch<2, false>{});
    }
  }
};

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  codecs::implement_operators<blockwise::Codec, CudaKernels<BlockwiseFormats>>(m);
}

}  // namespace
}  // namespace commhook::cuda
