// The kernels of block quantisation with 4 bits.
#include "block_launch.cuh"
#include "blockwise_block.h"

namespace commhook::cuda {

template struct BlockLaunch<BlockwiseBlock<4, true>>;
template struct BlockLaunch<BlockwiseBlock<4, false>>;

}  // namespace commhook::cuda
