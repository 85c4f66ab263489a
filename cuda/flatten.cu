#include <ATen/Dispatch.h>

#include "bucket_launch.h"
#include "launch.cuh"
#include "row.h"
#include "warp.cuh"

namespace commhook::cuda {
namespace {

template <typename To, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    flatten_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table, To* buffer,
                   double scale, int run) {
  NoMeasure meter;
  flatten_run(table, buffer, scale, run_of(blockIdx.x, warp_of_block(), run, table.total),
              lane_of_warp(), meter);
}

}  // namespace

void launch_flatten(c10::ArrayRef<Segment<const void>> segments, double scale,
                    const at::Tensor& buffer) {
  if (segments.empty()) {
    return;
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, buffer.scalar_type(), "flatten", [&] {
    auto* data = buffer.mutable_data_ptr<scalar_t>();
    for_each_table(segments, [&](const auto& table, int64_t offset) {
      constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
      const auto grid = grid_of(flatten_kernel<scalar_t, kCapacity>, table.total);
      flatten_kernel<scalar_t, kCapacity>
          <<<grid.blocks, kThreads, 0, stream>>>(table, data + offset, scale, grid.run);
    });
  });
}

}  // namespace commhook::cuda
