// The kernels of block quantisation with 8 bits.
#include "block_launch.cuh"
#include "blockwise_block.h"

namespace commhook::cuda {

template struct BlockLaunch<BlockwiseBlock<8, true>>;
template struct BlockLaunch<BlockwiseBlock<8, false>>;

}  // namespace commhook::cuda
