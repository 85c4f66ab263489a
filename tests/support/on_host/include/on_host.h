// Runs CUDA kernels on the host: a block's threads are coroutines of one thread of the host. Each
// runs until a barrier, and a warp until the block's next one. The order is random each time, so
// that a missing barrier shows. A shuffle waits only for the lane that it takes from, as it is no
// barrier for memory. Shared memory begins with arbitrary bytes in each block. Threads that wait
// for others that do not come are an error, not a hang. races.h finds accesses that no barrier
// orders; requests.h counts the cost of a warp's accesses.
#ifndef COMMHOOK_ON_HOST_H  // in a precompiled header, this is another file than the build's
#define COMMHOOK_ON_HOST_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

#define CUDART_VERSION 12010

struct Dim {
  unsigned x;
};
// Values of the running thread.
extern thread_local Dim threadIdx;
extern thread_local Dim blockIdx;
extern thread_local Dim blockDim;
extern thread_local Dim gridDim;

namespace on_host {

constexpr int kLanes = 32;

// Runs run(context) once for each thread of each block, and returns.
void run_launch(const char* name, unsigned blocks, unsigned threads, size_t shared_bytes,
                void (*run)(const void* context), const void* context);

// Launches a kernel that is a lambda. Evaluates its arguments once, as CUDA does.
template <typename Kernel, typename... Arguments>
  requires std::is_class_v<Kernel>
void launch(const char* name, unsigned blocks, unsigned threads, size_t shared_bytes,
            int /*stream*/, const Kernel& kernel, const Arguments&... arguments) {
  // On this stack, which the observers know: a thread's reads of its arguments cost no request.
  const auto call = std::make_pair(&kernel, std::tuple<Arguments...>(arguments...));
  using Call = decltype(call);
  run_launch(
      name, blocks, threads, shared_bytes,
      [](const void* context) {
        const auto& [own, values] = *static_cast<const std::remove_const_t<Call>*>(context);
        std::apply(*own, values);
      },
      &call);
}

// The same for a function; converts the arguments to its parameters' types once.
template <typename... Parameters>
void launch(const char* name, unsigned blocks, unsigned threads, size_t shared_bytes, int stream,
            void (*kernel)(Parameters...), std::type_identity_t<Parameters>... arguments) {
  const auto call = [kernel](const Parameters&... values) { kernel(values...); };
  launch(name, blocks, threads, shared_bytes, stream, call, arguments...);
}

// The block's dynamic shared memory, with the size of the launch.
void* dynamic_memory();
// Fills a block's variable with arbitrary bytes when its first thread gets there.
void begin_static(void* memory, size_t bytes);

// The place of a call of a barrier in the kernel.
struct Place {
  const char* file;
  int line;
};
void wait_for_block(Place place);
void wait_for_warp(uint32_t lanes, Place place);

// Reports that the running thread will read and write memory atomically, or has a fence of the
// device.
void observe_atomic(const void* memory, size_t bytes, const void* instruction);
void observe_fence();
void wait_for_other_block();

// Takes the value that another lane of the warp gives in its call with the same number. All lanes
// must call it equally often: no kernel shuffles in a part of a warp.
void exchange(uint32_t lanes, const void* given, void* taken, size_t bytes, int from);

template <typename T>
T shuffled(uint32_t lanes, const T& value, int from) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  T taken;
  exchange(lanes, &value, &taken, sizeof(T), from);
  return taken;
}

inline int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

}  // namespace on_host

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  on_host::wait_for_block({file, line});
}
inline void __syncwarp(uint32_t lanes = 0xffffffffu, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  on_host::wait_for_warp(lanes, {file, line});
}
inline void __threadfence() { on_host::observe_fence(); }

template <typename T>
T __shfl_sync(uint32_t lanes, T value, int from) {
  return on_host::shuffled(lanes, value, from % on_host::kLanes);
}
template <typename T>
T __shfl_xor_sync(uint32_t lanes, T value, int mask) {
  return on_host::shuffled(lanes, value, on_host::lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(uint32_t lanes, T value, int distance) {
  const int from = on_host::lane() - distance;
  return on_host::shuffled(lanes, value, from < 0 ? on_host::lane() : from);
}
template <typename T>
T __shfl_down_sync(uint32_t lanes, T value, int distance) {
  const int from = on_host::lane() + distance;
  return on_host::shuffled(lanes, value, from >= on_host::kLanes ? on_host::lane() : from);
}

inline uint32_t __ballot_sync(uint32_t lanes, bool value) {
  uint32_t all = value ? 1u << on_host::lane() : 0u;
  for (int distance = 1; distance < on_host::kLanes; distance *= 2) {
    all |= __shfl_xor_sync(lanes, all, distance);
  }
  return all;
}

inline bool __any_sync(uint32_t lanes, bool value) { return __ballot_sync(lanes, value) != 0; }

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Blocks run one after the other, so a block that waits for another would wait forever.
inline void __nanosleep(unsigned) { on_host::wait_for_other_block(); }

// No other thread of the kernel runs meanwhile. Tells the observers once, with the caller.
#define ON_HOST_ATOMIC(name, parameters, after)                          \
  template <typename T>                                                  \
  [[gnu::noinline, gnu::no_sanitize("thread")]] T name parameters {      \
    on_host::observe_atomic(to, sizeof(T), __builtin_return_address(0)); \
    const T before = *to;                                                \
    *to = after;                                                         \
    return before;                                                       \
  }
ON_HOST_ATOMIC(atomicAdd, (T * to, T value), before + value)
ON_HOST_ATOMIC(atomicExch, (T * to, T value), value)
ON_HOST_ATOMIC(atomicMax, (T * to, T value), before < value ? value : before)
ON_HOST_ATOMIC(atomicMin, (T * to, T value), value < before ? value : before)
ON_HOST_ATOMIC(atomicOr, (T * to, T value), before | value)
ON_HOST_ATOMIC(atomicAnd, (T * to, T value), before& value)
ON_HOST_ATOMIC(atomicCAS, (T * to, T expected, T value), before == expected ? value : before)
#undef ON_HOST_ATOMIC

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

// ---- the host's side -------------------------------------------------------------------------

#define C10_CUDA_KERNEL_LAUNCH_CHECK()
#define C10_CUDA_CHECK(call) (call)

inline int cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return 0;
}

namespace on_host {
struct Properties {
  int multiProcessorCount;
  int maxThreadsPerMultiProcessor;
};
// The properties of the simulated device, and its number; each number of warps (set_warps) has
// another.
extern Properties properties;
extern int8_t device;
struct Guard {
  template <typename Device>
  explicit Guard(const Device&) {}
};
}  // namespace on_host

namespace at::cuda {
inline const on_host::Properties* getCurrentDeviceProperties() { return &on_host::properties; }
}  // namespace at::cuda

// Only the threads limit the blocks, not registers or shared memory.
inline int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* /*kernel*/,
                                                         int threads, size_t /*shared_bytes*/) {
  *blocks = on_host::properties.maxThreadsPerMultiProcessor / threads;
  return 0;
}

namespace c10::cuda {
using CUDAGuard = on_host::Guard;
inline int8_t current_device() { return on_host::device; }
inline int getCurrentCUDAStream() { return 0; }
}  // namespace c10::cuda

#endif
