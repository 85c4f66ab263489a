// The kernels of block quantisation with 2 bits.
#include "blockwise_launch.cuh"

namespace commhook::cuda {

template struct BlockwiseLaunch<BlockwiseBlock<2, true>>;
template struct BlockwiseLaunch<BlockwiseBlock<2, false>>;

}  // namespace commhook::cuda
