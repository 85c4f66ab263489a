// A tensor list as rows of memory: the CPU kernels use it to visit any part of a bucket.
//
// An operator takes one pass. It splits the bucket's elements, not its tensors, over the threads.
// Each thread walks over the rows of memory in its part (csrc/ops/cpu/segments.h). For each pair of
// dtypes a kernel converts a row (csrc/ops/cpu/row_kernels.inl). Each kernel is compiled three
// times, for any processor, AVX2 and AVX-512, and chosen at the call; COMMHOOK_CPU_CAPABILITY
// limits the choice.
//
// - Values are scaled in float32 (float64 if either side is float64) and rounded once. Without a
//   scale or another dtype, the kernel copies the bits unchanged, including NaN.
// - A destination of a quarter of the last-level cache or more, which does not fit there together
//   with its source, is written with non-temporal stores. This saves reading every written line.
// - Elements that are not contiguous go through a small buffer.
// - Sums are taken over fixed chunks and added in order, so they do not depend on the threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/cpu/row_kernels.h"

namespace commhook::cpu {

// With fewer elements, waking a thread costs more than it saves.
inline constexpr int64_t kGrainElements = 64 * 1024;

// One tensor of the list. Elements are counted in logical (row-major) order.
struct Segment {
  char* data;
  int64_t begin;  // the first element's position in the bucket
  int64_t end;
  int element_size;
  int dtype;  // dtype_index
  // For a tensor that is not contiguous: its dimensions, merged where they are contiguous together.
  int dims;  // 0 if contiguous
  size_t first_dimension;
  const int64_t* shape;
  const int64_t* stride;  // in elements
};

class Segments {
 public:
  // The tensors must outlive this.
  explicit Segments(at::TensorList tensors);

  int64_t total() const { return total_; }

  // The segment of an element.
  const Segment& at(int64_t position) const { return segments_[find(position)]; }

  // Calls row(segment, data, position, count) for each contiguous row of the elements [begin, end)
  // of the bucket. Calls strided(segment, position, count) for pieces of at most kPieceElements
  // elements that are not contiguous. position counts from the start of the bucket.
  template <typename Row, typename Strided>
  void walk(int64_t begin, int64_t end, const Row& row, const Strided& strided) const;

  // Prefetches the beginnings of the tensors after a segment, which processors do not prefetch
  // themselves. Inlined, since compilers drop calls of functions that seem to do nothing.
  __attribute__((always_inline)) void prefetch_after(const Segment& segment) const {
    constexpr int64_t kBytes = 8 * 1024;
    constexpr int64_t kLine = 64;
    constexpr int64_t kMostTensors = 8;
    const int64_t after = segments_.data() + segments_.size() - (&segment + 1);
    const Segment* const end = &segment + 1 + std::min(after, kMostTensors);
    int64_t left = kBytes;
    for (const Segment* next = &segment + 1; next != end && left > 0; ++next) {
      const int64_t bytes = std::min(left, (next->end - next->begin) * next->element_size);
      for (int64_t i = 0; i < bytes; i += kLine) {
        __builtin_prefetch(next->data + i);
      }
      left -= bytes;
    }
  }

  static constexpr int64_t kPieceElements = 512;

 private:
  size_t find(int64_t position) const;

  std::vector<Segment> segments_;
  std::vector<int64_t> dimensions_;
  int64_t total_ = 0;
};

// Copies `count` elements of a strided segment, from the bucket position on, to or from a
// contiguous piece.
void gather(const Segment& segment, int64_t position, int64_t count, char* piece);
void scatter(const Segment& segment, int64_t position, int64_t count, const char* piece);

template <typename Row, typename Strided>
void Segments::walk(int64_t begin, int64_t end, const Row& row, const Strided& strided) const {
  for (size_t i = find(begin); begin < end; ++i) {
    const Segment& segment = segments_[i];
    const int64_t stop = segment.end < end ? segment.end : end;
    if (segment.dims == 0) {
      if (begin < stop) {
        row(segment, segment.data + (begin - segment.begin) * segment.element_size, begin,
            stop - begin);
        begin = stop;
      }
      continue;
    }
    while (begin < stop) {
      const int64_t left = stop - begin;
      const int64_t count = left < kPieceElements ? left : kPieceElements;
      strided(segment, begin, count);
      begin += count;
    }
  }
}

}  // namespace commhook::cpu
