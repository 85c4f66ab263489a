// The kernels of block quantisation with 4 bits.
#include "blockwise_launch.cuh"

namespace commhook::cuda {

template struct BlockwiseLaunch<BlockwiseBlock<4, true>>;
template struct BlockwiseLaunch<BlockwiseBlock<4, false>>;

}  // namespace commhook::cuda
