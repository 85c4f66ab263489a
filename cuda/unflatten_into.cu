#include <ATen/Dispatch.h>

#include "bucket_launch.h"
#include "launch.cuh"
#include "row.h"
#include "warp.cuh"

namespace commhook::cuda {
namespace {

template <typename From, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    unflatten_into_kernel(const __grid_constant__ TensorTable<void, kCapacity> table,
                          const From* buffer, double scale, int run) {
  unflatten_run(table, buffer, scale, run_of(blockIdx.x, warp_of_block(), run, table.total),
                lane_of_warp());
}

}  // namespace

void launch_unflatten_into(const at::Tensor& buffer, c10::ArrayRef<Segment<void>> segments,
                           double scale) {
  if (segments.empty()) {
    return;
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, buffer.scalar_type(), "unflatten_into", [&] {
        const auto* data = buffer.const_data_ptr<scalar_t>();
        for_each_table(segments, [&](const auto& table, int64_t offset) {
          constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
          const auto grid = grid_of(unflatten_into_kernel<scalar_t, kCapacity>, table.total);
          unflatten_into_kernel<scalar_t, kCapacity>
              <<<grid.blocks, kThreads, 0, stream>>>(table, data + offset, scale, grid.run);
        });
      });
}

}  // namespace commhook::cuda
