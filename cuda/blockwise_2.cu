// The kernels of block quantisation with 2 bits.
#include "block_launch.cuh"
#include "blockwise_block.h"

namespace commhook::cuda {

template struct BlockLaunch<BlockwiseBlock<2, true>>;
template struct BlockLaunch<BlockwiseBlock<2, false>>;

}  // namespace commhook::cuda
