// The functions that the compiler calls from instrumented code (-fsanitize=thread
// -fsanitize-coverage=trace-pc), before each access of memory and in each basic block. They replace
// a sanitizer's library, which would need LD_PRELOAD in Python and does not know warps.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "on_host.h"
#include "races.h"
#include "requests.h"
#include "thread.h"

namespace on_host {
namespace {

bool is_of(const Dim& dim, uintptr_t address) {
  return address - reinterpret_cast<uintptr_t>(&dim) < sizeof(Dim);
}

// Whether a GPU would keep it outside of shared and global memory: a thread's own variables, the
// kernel's arguments, and the registers of threadIdx and blockIdx.
bool is_local(const Observed& thread, uintptr_t address) {
  return thread.stack.contains(address) || thread.arguments.contains(address) ||
         is_of(threadIdx, address) || is_of(blockIdx, address) || is_of(blockDim, address) ||
         is_of(gridDim, address);
}

void observe(const Observed& thread, uintptr_t address, unsigned bytes, races::Kind kind,
             const void* instruction) {
  const bool is_in_shared = is_shared(address);
  races::access(thread.thread, address, bytes, kind, is_in_shared, instruction);
  if (requests::is_watched()) {
    using requests::Kind;
    const bool writes = kind == races::Kind::kWrite || kind == races::Kind::kAtomicWrite ||
                        kind == races::Kind::kRelease;
    const int step = kind == races::Kind::kAtomicBoth ? 2 : writes ? 1 : 0;
    const int first = static_cast<int>(is_in_shared ? Kind::kSharedLoad : Kind::kGlobalLoad);
    requests::access(thread.thread, address, bytes, static_cast<Kind>(first + step), instruction);
  }
}

void access(const void* memory, unsigned bytes, races::Kind kind, const void* instruction) {
  const Observed* const thread = observed;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  if (thread != nullptr && !is_local(*thread, address)) {
    observe(*thread, address, bytes, kind, instruction);
  }
}

races::Kind kind_of_load(int order) {
  return order == __ATOMIC_RELAXED ? races::Kind::kAtomicRead : races::Kind::kAcquire;
}
races::Kind kind_of_store(int order) {
  return order == __ATOMIC_RELAXED ? races::Kind::kAtomicWrite : races::Kind::kRelease;
}

// A struct without the alignment of a vector of its size moves in accesses of its members' size.
void access_range(const void* memory, size_t bytes, races::Kind kind, const void* instruction) {
  const Observed* const thread = observed;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  if (thread == nullptr || is_local(*thread, address)) {
    return;
  }
  const size_t each = (address | bytes) % 4 == 0 ? 4 : (address | bytes) % 2 == 0 ? 2 : 1;
  for (size_t done = 0; done < bytes; done += each) {
    observe(*thread, address + done, static_cast<unsigned>(each), kind, instruction);
  }
}

}  // namespace

void observe_atomic(const void* memory, size_t bytes, const void* instruction) {
  access(memory, static_cast<unsigned>(bytes), races::Kind::kAtomicBoth, instruction);
}

void observe_fence() {
  if (const Observed* const thread = observed; thread != nullptr) {
    races::cross_fence(thread->thread);
  }
}

}  // namespace on_host

using on_host::races::Kind;

static bool is_watched(const on_host::Observed* thread) {
  return on_host::requests::is_watched() && thread != nullptr;
}

#define ON_HOST_ACCESS(name, bytes, kind) \
  void name(void* memory) { on_host::access(memory, bytes, kind, __builtin_return_address(0)); }
#define ON_HOST_ACCESSES(bytes)                                         \
  ON_HOST_ACCESS(__tsan_read##bytes, bytes, Kind::kRead)                \
  ON_HOST_ACCESS(__tsan_write##bytes, bytes, Kind::kWrite)              \
  ON_HOST_ACCESS(__tsan_volatile_read##bytes, bytes, Kind::kAtomicRead) \
  ON_HOST_ACCESS(__tsan_volatile_write##bytes, bytes, Kind::kAtomicWrite)

// Loads and stores of signals between ranks. The other functions serve std::atomic, which only host
// code around the kernels uses.
#define ON_HOST_UPDATE(bits, type, name)                             \
  type __tsan_atomic##bits##_##name(type* memory, type value, int) { \
    return __atomic_##name(memory, value, __ATOMIC_SEQ_CST);         \
  }
#define ON_HOST_EXCHANGE(bits, type, name)                                                     \
  bool __tsan_atomic##bits##_compare_exchange_##name(type* memory, type* expected, type value, \
                                                     int, int) {                               \
    return __atomic_compare_exchange_n(memory, expected, value, false, __ATOMIC_SEQ_CST,       \
                                       __ATOMIC_SEQ_CST);                                      \
  }
#define ON_HOST_ATOMICS(bits, type)                                       \
  type __tsan_atomic##bits##_load(const type* memory, int order) {        \
    on_host::access(memory, sizeof(type), on_host::kind_of_load(order),   \
                    __builtin_return_address(0));                         \
    return __atomic_load_n(memory, __ATOMIC_SEQ_CST);                     \
  }                                                                       \
  void __tsan_atomic##bits##_store(type* memory, type value, int order) { \
    on_host::access(memory, sizeof(type), on_host::kind_of_store(order),  \
                    __builtin_return_address(0));                         \
    __atomic_store_n(memory, value, __ATOMIC_SEQ_CST);                    \
  }                                                                       \
  type __tsan_atomic##bits##_exchange(type* memory, type value, int) {    \
    return __atomic_exchange_n(memory, value, __ATOMIC_SEQ_CST);          \
  }                                                                       \
  ON_HOST_UPDATE(bits, type, fetch_add)                                   \
  ON_HOST_UPDATE(bits, type, fetch_sub)                                   \
  ON_HOST_UPDATE(bits, type, fetch_and)                                   \
  ON_HOST_UPDATE(bits, type, fetch_or)                                    \
  ON_HOST_UPDATE(bits, type, fetch_xor)                                   \
  ON_HOST_EXCHANGE(bits, type, strong)                                    \
  ON_HOST_EXCHANGE(bits, type, weak)

extern "C" {

ON_HOST_ACCESSES(1)
ON_HOST_ACCESSES(2)
ON_HOST_ACCESSES(4)
ON_HOST_ACCESSES(8)
ON_HOST_ACCESSES(16)

void __tsan_read_range(void* memory, size_t bytes) {
  on_host::access_range(memory, bytes, Kind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* memory, size_t bytes) {
  on_host::access_range(memory, bytes, Kind::kWrite, __builtin_return_address(0));
}

ON_HOST_ATOMICS(8, uint8_t)
ON_HOST_ATOMICS(16, uint16_t)
ON_HOST_ATOMICS(32, uint32_t)
ON_HOST_ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) { std::atomic_thread_fence(std::memory_order_seq_cst); }
void __tsan_atomic_signal_fence(int) {}

void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

void __tsan_func_entry(void* call) {
  if (is_watched(on_host::observed)) {
    on_host::requests::enter(on_host::observed->thread, call);
  }
}
void __tsan_func_exit() {
  if (is_watched(on_host::observed)) {
    on_host::requests::leave(on_host::observed->thread);
  }
}
void __sanitizer_cov_trace_pc() {
  if (is_watched(on_host::observed)) {
    on_host::requests::come_to(on_host::observed->thread, __builtin_return_address(0));
  }
}

}  // extern "C"
