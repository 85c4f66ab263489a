// What the accesses of a kernel's warps cost: the lanes' accesses are put together again as a warp
// would issue them, each instruction once for all lanes that come to it. A request of global memory
// moves sectors of 32 bytes, one of shared memory takes a pass for each word that a bank has to
// give.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace on_host::requests {

enum class Kind : uint8_t {
  kGlobalLoad,
  kGlobalStore,
  kGlobalAtomic,
  kSharedLoad,
  kSharedStore,
  kSharedAtomic
};

// Of one instruction of a kernel.
struct Cost {
  std::string kernel;
  Kind kind;
  const void* instruction;
  int64_t requests = 0;
  int64_t parts = 0;   // sectors or passes
  int64_t fewest = 0;  // of which so many would have done
  int64_t bytes = 0;   // each once for a request
};

// Whether launches are watched from now on.
void watch(bool is_watched);
bool is_watched();

void begin_launch(const char* kernel, unsigned threads);
void begin_block();
void end_block();

// The running thread comes to an instruction, enters a function or leaves it.
void access(unsigned thread, uintptr_t address, unsigned bytes, Kind kind, const void* instruction);
void come_to(unsigned thread, const void* instruction);
void enter(unsigned thread, const void* call);
void leave(unsigned thread);

// Of all launches since the last call.
std::vector<Cost> take();

}  // namespace on_host::requests
