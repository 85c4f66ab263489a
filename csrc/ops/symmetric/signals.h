// Signals among ranks that share memory, for host and device. A rank counts its barriers and sends
// each other rank its count. A rank that gives up sends its last count, marked as final. So the
// others still pass the barriers that it reached, whenever they look.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

#ifndef __CUDA_ARCH__
#include <chrono>
#include <thread>
#endif

namespace commhook::symmetric {

constexpr int kMaxRanks = 16;

// The signal of a rank that has reached so many barriers, and may have given up after that.
COMMHOOK_HOST_DEVICE int64_t signal_of(int64_t barriers, bool has_given_up) {
  return has_given_up ? ~barriers : barriers;
}

// A rank's controls: the signals from the other ranks; the number of its barriers; and the failure:
// 0, or 1 + the rank that did not come.
COMMHOOK_HOST_DEVICE int64_t* signal_from(int64_t* controls, int rank) { return controls + rank; }
COMMHOOK_HOST_DEVICE int64_t* count_in(int64_t* controls, int ranks) { return controls + ranks; }
COMMHOOK_HOST_DEVICE int64_t* failure_in(int64_t* controls, int ranks) {
  return controls + ranks + 1;
}
constexpr int64_t control_words(int64_t ranks) { return ranks + 2; }

// A rank that sees the signal also sees everything that this rank has written before.
COMMHOOK_HOST_DEVICE void send(int64_t* to, int64_t signal) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(signal) : "memory");
#else
  __atomic_store_n(to, signal, __ATOMIC_RELEASE);
#endif
}

COMMHOOK_HOST_DEVICE int64_t received(const int64_t* from) {
#ifdef __CUDA_ARCH__
  int64_t signal;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(signal) : "l"(from) : "memory");
  return signal;
#else
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
#endif
}

COMMHOOK_HOST_DEVICE int64_t now_in_nanoseconds() {
#ifdef __CUDA_ARCH__
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
#endif
}

// Pauses between two looks at a signal.
COMMHOOK_HOST_DEVICE void rest() {
#ifdef __CUDA_ARCH__
  asm volatile("nanosleep.u32 100;");
#else
  std::this_thread::yield();
#endif
}

// Waits until a rank reaches a barrier. Returns false if the rank has given up before, or the time
// is over.
COMMHOOK_HOST_DEVICE bool wait_for(const int64_t* from, int64_t barrier, int64_t nanoseconds) {
  const int64_t begin = now_in_nanoseconds();
  for (;;) {
    const int64_t signal = received(from);
    if ((signal < 0 ? ~signal : signal) >= barrier) {
      return true;
    }
    if (signal < 0 || now_in_nanoseconds() - begin > nanoseconds) {
      return false;
    }
    rest();
  }
}

}  // namespace commhook::symmetric
