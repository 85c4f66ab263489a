// Kernels that convert, scale, measure or check `count` elements of a contiguous row. One source
// (row_kernels.inl) gives a set of them for each instruction set.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "ops/cpu/capability.h"

namespace commhook::cpu {

struct RowStats {
  double sum_of_squares = 0;    // of the scaled values, before the cast
  int64_t nonfinite_count = 0;  // of the written values
};

using RowKernel = void (*)(const void* source, void* destination, int64_t count, double scale,
                           RowStats* stats);

// Counts the infinite and NaN elements.
using RowCounter = int64_t (*)(const void* source, int64_t count);

constexpr int kDtypes = 4;
inline int dtype_index(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0;
    case at::kFloat:
      return 1;
    case at::kHalf:
      return 2;
    default:
      return 3;  // bfloat16
  }
}

struct RowKernels {
  // Indexed by [source dtype][destination dtype]. `streamed` writes past the caches; for
  // destinations larger than the caches this saves reading each line that is written. Only
  // `measured` uses stats.
  RowKernel plain[kDtypes][kDtypes];
  RowKernel streamed[kDtypes][kDtypes];
  RowKernel measured[kDtypes][kDtypes];
  RowKernel streamed_measured[kDtypes][kDtypes];
  RowCounter count_nonfinite[kDtypes];
  // Streams whole cache lines, aligned on both sides, past the caches. They arrive in any order
  // until `fence`, which waits for memory; call it once for many lines.
  void (*stream_lines)(const void* source, void* destination, int64_t bytes);
  void (*fence)();
};

extern const RowKernels kRowKernelsDefault;
#ifdef COMMHOOK_X86_KERNELS
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;
#endif

inline const RowKernels& row_kernels(Capability capability) {
#ifdef COMMHOOK_X86_KERNELS
  if (capability == Capability::kAvx512) {
    return kRowKernelsAvx512;
  }
  if (capability == Capability::kAvx2) {
    return kRowKernelsAvx2;
  }
#endif
  (void)capability;
  return kRowKernelsDefault;
}

}  // namespace commhook::cpu
