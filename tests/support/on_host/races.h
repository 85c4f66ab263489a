// Finds races between the threads of a kernel by the order of accesses, not by their values. Two
// accesses of one byte, at least one of them a write, race unless barriers (or atomics with fences)
// order them. So every run finds a missing barrier, in any order of the threads.
//
// __syncwarp orders the lanes that it names, __syncthreads the block's threads, and a launch
// everything before it. A shuffle orders nothing. An atomic access alone orders nothing, and races
// with no other atomic access. An atomic read orders if it reads a value that another thread has
// written after a __threadfence(), once its own thread has called __threadfence() too. A store with
// release and a load with acquire need no fence. Volatile accesses count as atomic. Launches of
// several threads of the host are independent: reads of another rank's memory are not checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "thread.h"

namespace on_host::races {

enum class Kind : uint8_t {
  kRead,
  kWrite,
  kAtomicRead,
  kAtomicWrite,
  kAtomicBoth,
  kAcquire,  // an atomic read that orders
  kRelease   // an atomic write that orders
};

void begin_launch(const char* kernel, unsigned threads);
void begin_block(unsigned block);
// Reports that threads of a warp, from `first` on, leave a barrier of these lanes.
void cross_warp_barrier(unsigned first, uint32_t lanes);
void cross_block_barrier();
void cross_fence(unsigned thread);
void access(unsigned thread, uintptr_t address, unsigned bytes, Kind kind, bool is_shared,
            const void* instruction);
// Ends the launch. Returns a description of its races and forbidden accesses; empty for none.
std::string end_launch();

// Kernels may touch no global memory in these ranges. Called while no kernel runs.
void forbid(std::vector<Range> ranges);

}  // namespace on_host::races
