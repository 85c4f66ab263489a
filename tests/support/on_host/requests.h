// The cost of the accesses of a kernel's warps. Replays the lanes' accesses as a warp would issue
// them: each instruction once for all lanes that execute it together. A request of global memory
// moves sectors of 32 bytes. A request of shared memory takes a pass for each word of its busiest
// bank.
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

// The cost of one instruction of a kernel.
struct Cost {
  std::string kernel;
  Kind kind;
  const void* instruction;
  int64_t requests = 0;
  int64_t parts = 0;   // sectors or passes
  int64_t fewest = 0;  // the fewest possible
  int64_t bytes = 0;   // each byte once for a request
};

// Sets whether launches are watched from now on.
void watch(bool is_watched);
bool is_watched();

void begin_launch(const char* kernel, unsigned threads);
void begin_block();
void end_block();

// Reports that the running thread reaches an instruction, enters a function or leaves it.
void access(unsigned thread, uintptr_t address, unsigned bytes, Kind kind, const void* instruction);
void come_to(unsigned thread, const void* instruction);
void enter(unsigned thread, const void* call);
void leave(unsigned thread);

// The costs of all launches since the last call.
std::vector<Cost> take();

}  // namespace on_host::requests
