// The running thread of the kernel, for the observers of its accesses. Files that include this are
// compiled without instrumentation (see cuda_on_host.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace on_host {

// The memory [begin, end).
struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool contains(uintptr_t address) const { return address - begin < end - begin; }
};

struct Observed {
  unsigned thread = 0;  // its number in the block
  Range stack;          // the thread's own
  Range arguments;      // the host thread's stack, which holds the kernel's arguments
};

// Null between the kernel's threads, and for other threads of the host.
extern thread_local const Observed* observed;

// Whether the running block's shared memory contains the address.
bool is_shared(uintptr_t address);

}  // namespace on_host
