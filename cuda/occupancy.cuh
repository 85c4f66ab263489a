// The number of warps of a kernel that fit on the device at once.
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

// The number of warps of a kernel that fit on the device at once, in blocks of `threads` with
// `shared_bytes` at the launch. Cached for each device and kernel, since the driver computes it
// each time.
inline int64_t warps_of_a_wave(const void* kernel, int threads, size_t shared_bytes = 0) {
  using Key = std::tuple<c10::DeviceIndex, const void*, int, size_t>;
  static std::mutex mutex;
  static std::map<Key, int64_t> known;
  const Key key{c10::cuda::current_device(), kernel, threads, shared_bytes};
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(key);
  if (found == known.end()) {
    int blocks = 0;  // in a multiprocessor
    C10_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
    const int64_t all =
        int64_t{std::max(blocks, 1)} * at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    found = known.emplace(key, all * (threads / kWarpSize)).first;
  }
  return found->second;
}

template <typename... Arguments>
int64_t warps_of_a_wave(void (*kernel)(Arguments...), int threads, size_t shared_bytes = 0) {
  return warps_of_a_wave(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}

}  // namespace commhook::cuda
