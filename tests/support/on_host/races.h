// Races between the threads of a kernel, found by what orders their accesses and not by what the
// accesses happened to give: two accesses of one byte, at least one of them a write, race unless
// barriers (or atomics with fences) order them. So a missing barrier is found in every run, in
// whatever order the threads go.
//
// What orders: __syncwarp the lanes that it names, __syncthreads the block's threads, a launch all
// before it. Not a shuffle. An atomic access orders nothing by itself and races with none of its
// kind; one that reads what another thread has written after a __threadfence() orders, once its
// own thread has come to a __threadfence(), too. A store with release and a load with acquire need
// no fence. Volatile accesses count as atomic. Launches of several threads of the host know nothing
// of each other: what the kernels of one rank read of another's is not checked.
#pragma once

#include <cstdint>
#include <string>

namespace on_host::races {

enum class Kind : uint8_t {
  kRead,
  kWrite,
  kAtomicRead,
  kAtomicWrite,
  kAtomicBoth,
  kAcquire,  // an atomic read that orders
  kRelease   // such a write
};

void begin_launch(const char* kernel, unsigned threads);
void begin_block(unsigned block);
// Threads of a warp, from `first` on, come out of a barrier of these lanes.
void cross_warp_barrier(unsigned first, uint32_t lanes);
void cross_block_barrier();
void cross_fence(unsigned thread);
void access(unsigned thread, uintptr_t address, unsigned bytes, Kind kind, bool is_shared,
            const void* instruction);
// Ends the launch: the races that it had, in words; empty for none.
std::string end_launch();

}  // namespace on_host::races
