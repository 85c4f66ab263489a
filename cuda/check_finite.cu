#include "check_launch.h"
#include "launch.cuh"
#include "row.h"
#include "warp.cuh"

namespace commhook::cuda {
namespace {

// Gradients are nearly always finite, and then the kernel writes nothing. Sums of integers do not
// depend on the order, so atomics are deterministic; they also let several streams share a count.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    check_finite_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table, int run,
                        unsigned long long* count) {
  const int lane = lane_of_warp();
  int nonfinite =
      count_nonfinite_of_run(table, run_of(blockIdx.x, warp_of_block(), run, table.total), lane);
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    nonfinite += __shfl_down_sync(kWholeWarp, nonfinite, distance);
  }
  if (lane == 0 && nonfinite != 0) {
    atomicAdd(count, static_cast<unsigned long long>(nonfinite));
  }
}

}  // namespace

void launch_check_finite(c10::ArrayRef<Segment<const void>> segments, const at::Tensor& count) {
  if (segments.empty()) {
    return;
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto* data = reinterpret_cast<unsigned long long*>(count.mutable_data_ptr<int64_t>());
  for_each_table(segments, [&](const auto& table, int64_t) {
    constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
    const auto grid = grid_of(check_finite_kernel<kCapacity>, table.total);
    check_finite_kernel<kCapacity><<<grid.blocks, kThreads, 0, stream>>>(table, grid.run, data);
  });
}

}  // namespace commhook::cuda
