// The kernels of block quantisation with 8 bits.
#include "blockwise_launch.cuh"

namespace commhook::cuda {

template struct BlockwiseLaunch<BlockwiseBlock<8, true>>;
template struct BlockwiseLaunch<BlockwiseBlock<8, false>>;

}  // namespace commhook::cuda
