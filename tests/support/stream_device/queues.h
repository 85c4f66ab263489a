// The streams of a device whose memory is the host's: a thread for each, which runs one task after
// another.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace stream_device {

constexpr c10::DeviceType kType = c10::kPrivateUse1;
const c10::Device kDevice(kType, 0);

class Queue {
 public:
  // The number of tasks that have been added: a place in the queue.
  int64_t end() {
    const std::lock_guard lock(mutex_);
    return added_;
  }

  bool has_run(int64_t place) {
    const std::lock_guard lock(mutex_);
    return done_ >= place;
  }

  // Waits as a stream does, which passes errors on to nobody.
  void reach(int64_t place) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= place; });
  }

  // Waits as the host does. Throws what a task of any stream failed with.
  void synchronize(int64_t place);

  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    ++added_;
    changed_.notify_all();
  }

  [[noreturn]] void run();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  int64_t added_ = 0;
  int64_t done_ = 0;
};

// Calls a function without the GIL, which a task may need to let go of a tensor.
extern void (*without_gil)(const std::function<void()>& function);

// A queue that lives as long as the process, with a thread of its own.
c10::StreamId new_stream();
Queue& queue_of(c10::StreamId stream);
c10::StreamId current_stream();
c10::Stream stream_with(c10::StreamId id);

// A tensor on the host over the memory of one on the device, which it keeps.
at::Tensor on_host(const at::Tensor& tensor);

// Has operators of the library run their kernels for the CPU on streams, as CUDA runs its own.
void use_cpu_kernels(const std::vector<std::string>& operators);

}  // namespace stream_device
