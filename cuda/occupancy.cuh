// How many warps of a kernel the device has room for at once.
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "partition.h"

namespace commhook::cuda {

// Of blocks of so many warps and bytes of shared memory, on the current device. The driver is asked
// once for each kernel, shape and device.
template <typename Kernel>
int64_t warps_of_a_wave(Kernel* kernel, int warps, size_t shared) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, size_t>, int64_t> known;
  const int device = c10::cuda::current_device();
  const std::lock_guard<std::mutex> lock(mutex);
  auto& found = known[{reinterpret_cast<const void*>(kernel), device, warps, shared}];
  if (found == 0) {
    int blocks = 0;
    C10_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, warps * kWarpSize, shared));
    found = int64_t{at::cuda::getCurrentDeviceProperties()->multiProcessorCount} *
            std::max(blocks, 1) * warps;
  }
  return found;
}

}  // namespace commhook::cuda
