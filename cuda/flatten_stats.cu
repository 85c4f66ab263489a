#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "bucket_launch.h"
#include "launch.cuh"
#include "row.h"
#include "warp.cuh"

namespace commhook::cuda {
namespace {

struct Partial {
  double sum_of_squares;
  int64_t nonfinite_count;
};

__device__ Partial add(const Partial& a, const Partial& b) {
  return {a.sum_of_squares + b.sum_of_squares, a.nonfinite_count + b.nonfinite_count};
}

// The sum over the block, always in the same order; only thread 0 has it.
__device__ Partial sum_of_block(Partial partial) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const Partial other{__shfl_down_sync(kWholeWarp, partial.sum_of_squares, distance),
                        __shfl_down_sync(kWholeWarp, partial.nonfinite_count, distance)};
    partial = add(partial, other);
  }
  __shared__ Partial of_warp[kWarpsPerBlock];
  if (lane_of_warp() == 0) {
    of_warp[warp_of_block()] = partial;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < kWarpsPerBlock; ++warp) {
      partial = add(partial, of_warp[warp]);
    }
  }
  return partial;
}

// Writes one partial for each block. With atomics, the last bits of the sum would depend on which
// block ends first.
template <typename To, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    flatten_stats_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table,
                         To* buffer, double scale, int run, Partial* partials) {
  Measure meter;
  flatten_run(table, buffer, scale, run_of(blockIdx.x, warp_of_block(), run, table.total),
              lane_of_warp(), meter);
  const Partial partial = sum_of_block({meter.sum_of_squares, meter.nonfinite_count});
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = partial;
  }
}

// Runs in a single block: adds the partials of one launch to those of earlier launches.
__global__ void __launch_bounds__(kThreads)
    flatten_stats_sum_kernel(const Partial* partials, int count, bool is_first,
                             double* sum_of_squares, int64_t* nonfinite_count) {
  Partial partial{0, 0};
  for (int i = threadIdx.x; i < count; i += kThreads) {
    partial = add(partial, partials[i]);
  }
  partial = sum_of_block(partial);
  if (threadIdx.x == 0) {
    if (!is_first) {
      partial = add({*sum_of_squares, *nonfinite_count}, partial);
    }
    *sum_of_squares = partial.sum_of_squares;
    *nonfinite_count = partial.nonfinite_count;
  }
}

}  // namespace

void launch_flatten_stats(c10::ArrayRef<Segment<const void>> segments, double scale,
                          const at::Tensor& buffer, const at::Tensor& sum_of_squares,
                          const at::Tensor& nonfinite_count) {
  if (segments.empty()) {
    sum_of_squares.zero_();
    nonfinite_count.zero_();
    return;
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, buffer.scalar_type(), "flatten_stats", [&] {
        auto* data = buffer.mutable_data_ptr<scalar_t>();
        for_each_table(segments, [&](const auto& table, int64_t offset) {
          constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
          const auto grid = grid_of(flatten_stats_kernel<scalar_t, kCapacity>, table.total);
          // From the caching allocator, so that it is safe in a CUDA graph. Once freed, only later
          // work on this stream can receive it.
          const auto workspace = at::empty({static_cast<int64_t>(grid.blocks * sizeof(Partial))},
                                           buffer.options().dtype(at::kByte));
          auto* partials = static_cast<Partial*>(workspace.mutable_data_ptr());
          flatten_stats_kernel<scalar_t, kCapacity><<<grid.blocks, kThreads, 0, stream>>>(
              table, data + offset, scale, grid.run, partials);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
          flatten_stats_sum_kernel<<<1, kThreads, 0, stream>>>(
              partials, static_cast<int>(grid.blocks), offset == 0,
              sum_of_squares.mutable_data_ptr<double>(),
              nonfinite_count.mutable_data_ptr<int64_t>());
        });
      });
}

}  // namespace commhook::cuda
