// Stores that bypass the caches: for which destinations, and how.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

#include "ops/cpu/row_kernels.h"

namespace commhook::cpu {

// Destinations from this size on are written past the caches: the rest of a step evicts them before
// they are read again. The exact limit changes the backward of benchmarks/bench_hook.py by less
// than its noise. Streaming the 51 to 102 MB of ResNet-50 in benchmarks/bench_bucket.py is faster
// by a quarter and more.
int64_t streaming_bytes();

// Whether a copy is written past the caches: if its destination is that large, and the last-level
// cache cannot hold it together with the source. For a bucket of 14 MB that is read again at once,
// streaming past a cache of 32 MiB costs two threads a third of their speed.
bool copies_past_caches(int64_t read_bytes, int64_t written_bytes);

// The bytes of all elements together.
int64_t bytes_of(at::TensorList tensors);

constexpr int64_t kCacheLine = 64;

// Writes bytes past the caches. Collects them in the first-level cache, and sends whole cache lines
// from there.
class Stream {
 public:
  static constexpr int64_t kMost = 16384;

  // limit: the number of bytes to collect, at most kMost.
  Stream(const RowKernels& kernels, int64_t limit) : kernels_(kernels), limit_(limit) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    flush();
    kernels_.fence();
  }

  // The buffer for `count` bytes, at most `limit`, with the final address `to`.
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

  // Sends all lines except a line that further bytes may complete.
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
