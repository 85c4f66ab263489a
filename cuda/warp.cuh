// What the lanes of a warp do together, and the memory that a warp has to itself.
#pragma once

#include "instructions.h"
#include "partition.h"
#include "quad.h"

namespace commhook::cuda {

constexpr uint32_t kWholeWarp = 0xffffffffu;

// Of this thread.
__device__ inline int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int warp_of_block() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// This warp's part of the shared memory for which the launch asked: `bytes` for each warp.
__device__ inline float* shared_values(int bytes) {
  extern __shared__ Quad memory[];
  return reinterpret_cast<float*>(memory) +
         warp_of_block() * (bytes / static_cast<int>(sizeof(float)));
}

// The sum over this lane and those before it.
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

// Gives each lane the largest words of all lanes of its block, of which there are `lanes`.
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

// The sum over all lanes of a block, of which there are `lanes`, for each of these.
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
