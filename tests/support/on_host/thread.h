// The thread of the kernel that runs, as the observers of its accesses need it. What includes this
// is compiled without instrumentation (see cuda_on_host.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace on_host {

// Memory from `begin` on, up to `end`.
struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool contains(uintptr_t address) const { return address - begin < end - begin; }
};

struct Observed {
  unsigned thread = 0;  // of its block
  Range stack;          // its own
  Range arguments;      // the stack of the host's thread that launches holds the kernel's arguments
};

// Null between the kernel's threads, and for other threads of the host.
extern thread_local const Observed* observed;

// Of the running block.
bool is_shared(uintptr_t address);

}  // namespace on_host
