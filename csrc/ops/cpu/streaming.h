// Writing past the caches: which destinations, and how.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

#include "ops/cpu/row_kernels.h"

namespace commhook::cpu {

// A destination from this size on is written past the caches. By the time that it is read again the
// rest of a step has gone through them. Where exactly makes less difference to the backward of
// benchmarks/bench_hook.py than its noise; for the 51 to 102 MB of ResNet-50 in
// benchmarks/bench_bucket.py it is faster by a quarter and more.
int64_t streaming_bytes();

// Whether a copy is written past the caches: its destination is that large, and does not fit into
// the last-level cache together with its source. Of a bucket of 14 MB, read again at once, two
// threads lose a third by going past a cache of 32 MiB.
bool copies_past_caches(int64_t read_bytes, int64_t written_bytes);

// Of all elements together.
int64_t bytes_of(at::TensorList tensors);

constexpr int64_t kCacheLine = 64;

// Bytes on their way past the caches: collected in the first-level cache, from where they go in
// whole cache lines.
class Stream {
 public:
  static constexpr int64_t kMost = 16384;

  // limit: of the bytes that are collected, at most kMost.
  Stream(const RowKernels& kernels, int64_t limit) : kernels_(kernels), limit_(limit) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    flush();
    kernels_.fence();
  }

  // Where to write the `count` bytes, at most `limit`, that are to go to `to`.
  void* place(void* to, int64_t count) {
    auto* const target = static_cast<char*>(to);
    if (target != line_ + end_) {
      flush();
      begin_ = end_ = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % kLine);
      line_ = target - end_;
    } else if (end_ + count > limit_ + kLine) {
      send_lines();
    }
    void* const place = buffer_ + end_;
    end_ += count;
    return place;
  }

 private:
  static constexpr int64_t kLine = kCacheLine;

  // All but a line that is to be continued.
  void send_lines() {
    const int64_t whole = end_ / kLine * kLine;
    if (whole == 0) {
      return;
    }
    const int64_t first = begin_ == 0 ? 0 : kLine;
    std::memcpy(line_ + begin_, buffer_ + begin_, static_cast<size_t>(first - begin_));
    kernels_.stream_lines(buffer_ + first, line_ + first, whole - first);
    std::memcpy(buffer_, buffer_ + whole, static_cast<size_t>(end_ - whole));
    line_ += whole;
    begin_ = 0;
    end_ -= whole;
  }

  void flush() {
    send_lines();
    if (end_ > begin_) {
      std::memcpy(line_ + begin_, buffer_ + begin_, static_cast<size_t>(end_ - begin_));
    }
  }

  const RowKernels& kernels_;
  const int64_t limit_;
  // buffer_[i] goes to line_[i], for i from begin_ to end_.
  char* line_ = nullptr;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  alignas(kLine) char buffer_[kMost + kLine];
};

}  // namespace commhook::cpu
