// Shared by the passes of topk: the end of a launch, the search in counts, and the counts of the
// parts before a part.
#pragma once

#include "launch.cuh"
#include "topk_select.h"
#include "warp.cuh"

namespace commhook::cuda {

// Loads a value that other blocks of the launch may have written.
template <typename T>
__device__ T load_now(const T* from) {
  return *static_cast<const volatile T*>(from);
}

// Whether all other blocks of the launch have come here; then their earlier writes can be read. All
// threads of the block must call it. count: 0 at first.
__device__ inline bool is_last_block(int32_t* count) {
  __shared__ int32_t before;
  __syncthreads();
  if (threadIdx.x == 0) {
    // After the barrier, so that it releases the writes of all threads of the block.
    __threadfence();
    before = atomicAdd(count, 1);
    __threadfence();
  }
  __syncthreads();
  return before == static_cast<int32_t>(gridDim.x) - 1;
}

// For all threads of a block: the bin in which a count from the top reaches `wanted`, and how many
// values of that bin are wanted. Ignores the count of bin 0, which has all that the others do not
// have.
template <int kBins>
__device__ RankState find_bin(const int32_t* counts, int32_t wanted) {
  constexpr int kEach = kBins / kThreads;
  __shared__ int32_t of_warp[kWarpsPerBlock];
  __shared__ RankState found;
  const int lane = lane_of_warp();
  const int warp = warp_of_block();
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  int32_t own[kEach];
  int32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own[i] = top - i > 0 ? load_now(counts + top - i) : 0;
    sum += own[i];
  }
  int32_t up_to = sum_up_to(sum);  // below, also of the warps before this one
  if (lane == kWarpSize - 1) {
    of_warp[warp] = up_to;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarpsPerBlock; ++w) {
    up_to += w < warp ? of_warp[w] : 0;
  }
  int32_t left = wanted - (up_to - sum);
  if (left > 0 && left <= sum) {
    int bin = top;
#pragma unroll
    for (int i = 0; i < kEach - 1; ++i) {
      if (bin == top - i && left > own[i]) {
        left -= own[i];
        --bin;
      }
    }
    found = {bin, left};
  } else if (threadIdx.x == kThreads - 1 && left > sum) {
    found = {0, left - sum};
  }
  __syncthreads();
  return found;
}

// Takes the next part. Blocks that run take parts in order, so all earlier parts are finished or in
// progress. All threads of the block must call it.
__device__ inline int64_t take_part(int32_t* taken) {
  __shared__ int32_t part;
  if (threadIdx.x == 0) {
    part = atomicAdd(taken, 1);
  }
  __syncthreads();
  return part;
}

// For all lanes of one warp: publishes the counts of this part, and returns the sum of those of all
// parts before it. Reads the states of 32 parts at a time, back to one that includes all before it
// (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016).
__device__ inline RankCounts counts_before(uint64_t* states, int64_t part, const RankCounts& own) {
  const int lane = lane_of_warp();
  uint64_t before = 0;
  if (part > 0) {
    if (lane == 0) {
      *static_cast<volatile uint64_t*>(states + part) = part_state(Known::kOwn, own);
    }
    bool is_complete = false;
    for (int64_t last = part - 1; !is_complete; last -= kWarpSize) {
      uint64_t state = part_state(Known::kAllBefore, {0, 0});  // before the first part
      if (last - lane >= 0) {
        state = load_now(states + last - lane);
      }
      while (__any_sync(kWholeWarp, known_of(state) == Known::kNothing)) {
        __nanosleep(40);
        if (last - lane >= 0) {
          state = load_now(states + last - lane);
        }
      }
      const uint32_t complete = __ballot_sync(kWholeWarp, known_of(state) == Known::kAllBefore);
      is_complete = complete != 0;
      // Counts lanes up to the first state that includes all before it.
      const bool is_counted = (complete & ((1u << lane) - 1)) == 0;
      uint64_t sum = is_counted ? counts_word(state) : 0;
#pragma unroll
      for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kWholeWarp, sum, distance);
      }
      before += sum;
    }
  }
  if (lane == 0) {
    const uint64_t all = before + part_state(Known::kNothing, own);
    *static_cast<volatile uint64_t*>(states + part) = part_state(Known::kAllBefore, counts_in(all));
  }
  return counts_in(before);
}

}  // namespace commhook::cuda
