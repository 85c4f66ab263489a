// Assigns work to lanes: the runs of a launch's warps, and the vectors of a row. Plain index
// arithmetic for host and device, so that a test needs no GPU.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace commhook::cuda {

constexpr int kWarpSize = 32;
constexpr int kThreads = 256;  // of a block
constexpr int kWarpsPerBlock = kThreads / kWarpSize;

// A run is the work of one warp: a power of two of elements, so that every run is aligned as well
// as the bucket. The shortest run lets 1000 tensors of 64 elements use every multiprocessor. The
// longest repays a warp's search for its first tensor many times over.
constexpr int kMinRun = 64;
constexpr int kMaxRun = 4096;

// The shortest run, within the bounds, with which `warps` warps, a single wave, move `total`
// elements.
inline int run_length(int64_t total, int64_t warps) {
  int run = kMinRun;
  while (run < kMaxRun && total > warps * run) {
    run *= 2;
  }
  return run;
}

inline int64_t block_count(int64_t total, int run) {
  const int64_t runs = (total + run - 1) / run;
  return (runs + kWarpsPerBlock - 1) / kWarpsPerBlock;
}

// The run of one warp, [begin, end), empty for warps past the last run.
struct Run {
  int64_t begin;
  int64_t end;
};

COMMHOOK_HOST_DEVICE Run run_of(int64_t block, int warp, int run, int64_t total) {
  const int64_t begin = (block * kWarpsPerBlock + warp) * run;
  const int64_t end = begin + run;
  return {begin, end < total ? end : total};
}

// A row, split at addresses that are aligned for vectors: `head` elements before the first,
// `vectors`, and `tail` elements after the last. The head is shorter than a vector, and so is the
// tail, unless a vector was moved into it.
struct RowSplit {
  int head;
  int vectors;
  int tail;
};

// misaligned: the distance, in elements, of the row's first one from the last aligned address.
template <int kWidth>
COMMHOOK_HOST_DEVICE RowSplit split_row(int misaligned, int count) {
  int head = misaligned == 0 ? 0 : kWidth - misaligned;
  head = head < count ? head : count;
  const int vectors = (count - head) / kWidth;
  return {head, vectors, count - head - vectors * kWidth};
}

// The same, but moves the last vector into the tail if a vector load would read more elements past
// the last vector, `beyond`, than the tail has.
template <int kWidth>
COMMHOOK_HOST_DEVICE RowSplit without_overread(const RowSplit& split, int beyond) {
  if (split.vectors == 0 || beyond <= split.tail) {
    return split;
  }
  return {split.head, split.vectors - 1, split.tail + kWidth};
}

// The element of head or tail that a lane moves, -1 for none. One step of the warp moves both
// edges: its first half the head, its second half the tail.
template <int kWidth>
COMMHOOK_HOST_DEVICE int edge_element(const RowSplit& split, int lane) {
  constexpr int kHalf = kWarpSize / 2;
  static_assert(2 * kWidth <= kHalf);  // the tail has at most 2 * kWidth - 1 elements
  if (lane < split.head) {
    return lane;
  }
  if (lane >= kHalf && lane - kHalf < split.tail) {
    return split.head + split.vectors * kWidth + lane - kHalf;
  }
  return -1;
}

// The size of a vector at an aligned address. A vector at another address lies in two of these.
template <int kWords>
struct __attribute__((__aligned__(4 * kWords), __may_alias__)) Granule {
  uint32_t words[kWords];
};

COMMHOOK_HOST_DEVICE uint32_t funnel_shift(uint32_t low, uint32_t high, int bits) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> bits);
#endif
}

// The bytes from `shift` on, counted from the first byte of `first`. shift is less than a granule,
// and a multiple of kElement bytes. All indices are constants, so that arrays stay in registers.
template <int kElement, int kWords>
COMMHOOK_HOST_DEVICE Granule<kWords> realign(const Granule<kWords>& first,
                                             const Granule<kWords>& second, int shift) {
  uint32_t words[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = first.words[i];
    words[kWords + i] = second.words[i];
  }
#pragma unroll
  for (int step = kWords / 2; step > 0 && 4 * step >= kElement; step /= 2) {
    const bool is_past = (shift / 4 & step) != 0;
#pragma unroll
    for (int i = 0; i + step < 2 * kWords; ++i) {
      words[i] = is_past ? words[i + step] : words[i];
    }
  }
  Granule<kWords> result;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    result.words[i] = kElement < 4 ? funnel_shift(words[i], words[i + 1], shift % 4 * 8) : words[i];
  }
  return result;
}

}  // namespace commhook::cuda
