// Barriers and gathers among ranks that share memory, on CUDA.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "launch.cuh"
#include "ops/symmetric/symmetric.h"
#include "row.h"
#include "sources.h"
#include "warp.cuh"

namespace commhook::cuda {
namespace {

using symmetric::kMaxRanks;

struct ControlTable {
  int64_t* controls[kMaxRanks];  // one for each rank
};

// One warp, with a lane for each other rank. Later kernels on the stream read what the ranks have
// written before. If a larger kernel waited, it could occupy the multiprocessors that another
// bucket's stream needs, and other ranks may wait for that bucket.
__global__ void __launch_bounds__(kWarpSize)
    barrier_kernel(const __grid_constant__ ControlTable table, int ranks, int rank,
                   int64_t nanoseconds) {
  const int lane = static_cast<int>(threadIdx.x);
  int64_t* const own = table.controls[rank];
  const bool had_failed = *symmetric::failure_in(own, ranks) != 0;
  const int64_t number = *symmetric::count_in(own, ranks) + (had_failed ? 0 : 1);
  const bool is_other = lane < ranks && lane != rank;
  int64_t* const to = is_other ? symmetric::signal_from(table.controls[lane], rank) : nullptr;
  if (is_other) {
    symmetric::send(to, symmetric::signal_of(number, had_failed));
  }
  __syncwarp();  // send to all ranks before waiting for any
  int missed = 0;
  if (is_other && !had_failed &&
      !symmetric::wait_for(symmetric::signal_from(own, lane), number, nanoseconds)) {
    missed = 1 + lane;
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const int other = __shfl_xor_sync(kWholeWarp, missed, distance);
    missed = other > missed ? other : missed;
  }
  if (is_other && missed != 0) {
    symmetric::send(to, symmetric::signal_of(number, true));
  }
  if (lane == 0) {
    *symmetric::count_in(own, ranks) = number;
    if (missed != 0) {
      *symmetric::failure_in(own, ranks) = missed;
    }
  }
}

// Moves bits as float32 values.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ TensorTable<const void, kMaxRanks> table, int run,
                  const int64_t* failed, float* message) {
  const int lane = lane_of_warp();
  const Run own = run_of(blockIdx.x, warp_of_block(), run, table.total);
  if (failed != nullptr && *failed != 0) {
    for (int64_t i = own.begin + lane; i < own.end; i += kWarpSize) {
      reinterpret_cast<uint32_t*>(message)[i] = symmetric::kNoMessage * 0x01010101u;
    }
    return;
  }
  NoMeasure meter;
  flatten_run(table, message, 1.0, own, lane, meter);
}

void barrier(at::TensorList controls, int64_t rank, double timeout) {
  const auto nanoseconds = symmetric::check_barrier(controls, rank, timeout);
  const c10::cuda::CUDAGuard guard(controls[0].device());
  ControlTable table{};
  for (size_t i = 0; i < controls.size(); ++i) {
    table.controls[i] = controls[i].mutable_data_ptr<int64_t>();
  }
  barrier_kernel<<<1, kWarpSize, 0, c10::cuda::getCurrentCUDAStream()>>>(
      table, static_cast<int>(controls.size()), static_cast<int>(rank), nanoseconds);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void gather(at::TensorList shards, const at::Tensor& message,
            const std::optional<at::Tensor>& failed) {
  symmetric::check_gather(shards, message, failed);
  if (message.numel() == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(message.device());
  std::vector<Segment<const void>> segments;
  for (const auto& shard : shards) {
    if (shard.numel() > 0) {
      segments.push_back({shard.const_data_ptr(), shard.numel() / 4, Dtype::kFloat});
    }
  }
  const auto* const failure = numbers_of("symmetric_gather", "failed", failed);
  auto* const to = reinterpret_cast<float*>(message.mutable_data_ptr<uint8_t>());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for_each_table_of<kMaxRanks>(
      c10::ArrayRef<Segment<const void>>(segments), [&](const auto& table, int64_t) {
        const auto grid = grid_of(gather_kernel, table.total);
        gather_kernel<<<grid.blocks, kThreads, 0, stream>>>(table, grid.run, failure, to);
      });
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("symmetric_barrier", barrier);
  m.impl("symmetric_gather", gather);
}

}  // namespace
}  // namespace commhook::cuda
