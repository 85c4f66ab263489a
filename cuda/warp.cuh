// Operations of a warp's lanes together, and the warp's own memory.
#pragma once

#include "instructions.h"
#include "partition.h"
#include "quad.h"

namespace commhook::cuda {

constexpr uint32_t kWholeWarp = 0xffffffffu;

// The index of this thread's lane, and of its warp.
__device__ inline int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int warp_of_block() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// This warp's part of the launch's shared memory: `bytes` for each warp.
__device__ inline float* shared_values(int bytes) {
  extern __shared__ Quad memory[];
  return reinterpret_cast<float*>(memory) +
         warp_of_block() * (bytes / static_cast<int>(sizeof(float)));
}

// The sum over this lane and the lanes before it.
template <typename T>
__device__ T sum_up_to(T own) {
  const int lane = lane_of_warp();
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T before = __shfl_up_sync(kWholeWarp, own, distance);
    own += lane >= distance ? before : 0;
  }
  return own;
}

// Gives each lane the largest words of its block's `lanes` lanes.
template <typename Measure>
__device__ void take_largest(int lanes, Measure& measure) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int used = distance < lanes ? distance : 0;
#pragma unroll
    for (float& word : measure.words) {
      word = largest(word, __shfl_xor_sync(kWholeWarp, word, used));
    }
  }
}

// For each block, the sum over its `lanes` lanes.
__device__ inline uint32_t add_up(int lanes, uint32_t own) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const bool is_used = distance < lanes;
    const uint32_t other = __shfl_xor_sync(kWholeWarp, own, is_used ? distance : 0);
    own += is_used ? other : 0;
  }
  return own;
}

}  // namespace commhook::cuda
