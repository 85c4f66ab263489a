// Signals among ranks that share memory, for host and device. A rank counts its barriers, and tells
// each other rank the number that it has reached. One that gives up tells the last number, so that
// the others still pass the barriers to which it came. Nothing depends on when they look.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

#ifndef __CUDA_ARCH__
#include <chrono>
#include <thread>
#endif

namespace commhook::symmetric {

constexpr int kMaxRanks = 16;

// The signal of a rank that has come to so many barriers, and may have given up then.
COMMHOOK_HOST_DEVICE int64_t signal_of(int64_t barriers, bool has_given_up) {
  return has_given_up ? ~barriers : barriers;
}

// A rank's controls: the signals that the others have sent to it, its barriers so far, and why it
// has given up: 0 if it has not, else 1 + the rank that it missed.
COMMHOOK_HOST_DEVICE int64_t* signal_from(int64_t* controls, int rank) { return controls + rank; }
COMMHOOK_HOST_DEVICE int64_t* count_in(int64_t* controls, int ranks) { return controls + ranks; }
COMMHOOK_HOST_DEVICE int64_t* failure_in(int64_t* controls, int ranks) {
  return controls + ranks + 1;
}
constexpr int64_t control_words(int64_t ranks) { return ranks + 2; }

// What this rank has written before is there for whoever sees the signal.
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

// Between two looks at a signal.
COMMHOOK_HOST_DEVICE void rest() {
#ifdef __CUDA_ARCH__
  asm volatile("nanosleep.u32 100;");
#else
  std::this_thread::yield();
#endif
}

// Waits until a rank has come to a barrier: false if it gave up before, or does not come in time.
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
