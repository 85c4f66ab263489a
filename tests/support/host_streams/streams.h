// Streams of a device on the host, for doubles of devices and of process groups. Each is a thread
// that runs one task after another. A stream without a thread is the host itself.
//
// NCCL's Futures are complete when the collective is queued. Only wait() or a callback makes a
// stream wait for the values; value() does not. Two test doubles in tests/support/ find code that
// does not wait. Their streams and groups are in host_streams/:
//
// - stream_device/ is a device that uses the host's memory. Each of its streams is a thread. An
//   operator is a task on the current stream, and runs its CPU kernel. The host waits only where it
//   reads values. Memory holds NaN until a task writes it. The process group runs each collective
//   over Gloo, on a stream of its own, after a delay; hold() stops all of them. A second backend,
//   staged, uses no streams, as Gloo for CUDA tensors. PyTorch's OpenReg is a similar device, but
//   torch does not install it, and it has no process group with a delay.
// - stream_group/ is the process group alone, for tensors on the CPU. Compilers can run with it.
//
// The tests run all hooks on the device, and most of them also over the group. The results have the
// bits of Gloo, except those of powersgd: on a device ATen computes its products, and rounds
// differently. EchoGroup imitates two ranks in one process. On CUDA its collectives wait behind a
// kernel that sleeps. The doubles do not find memory that CUDA's allocator reuses too early,
// because a task keeps its tensors.
//
// test_stream_devices.py also puts the library's own streams on the device, for whole gradients,
// local steps and replicas of shards. It delays the stream of the gradients. Compiled backwards run
// there with hooks of all-reduces only, because the device's group has no all-gathers for compiled
// code.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace host_streams {

constexpr c10::DeviceType kType = c10::kPrivateUse1;
const c10::Device kDevice(kType, 0);
constexpr c10::StreamId kDefault = 0;

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

  // Waits as a stream does, without errors.
  void reach(int64_t place) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= place; });
  }

  // The error of the first task that failed; empty if none did.
  std::string error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    ++added_;
    changed_.notify_all();
  }

  // Makes run() return once all tasks are done.
  void close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return is_closed_ || !tasks_.empty(); });
      if (tasks_.empty()) {
        return;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      std::string failed;
      try {
        task();
      } catch (const std::exception& raised) {
        failed = raised.what();
      }
      task = nullptr;
      lock.lock();
      error_ = error_.empty() ? failed : error_;
      ++done_;
      changed_.notify_all();
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  int64_t added_ = 0;
  int64_t done_ = 0;
  std::string error_;
  bool is_closed_ = false;
};

struct Streams {
  std::mutex mutex;
  std::vector<Queue*> queues;  // by stream, never freed; nullptr for the host
};

inline Streams& streams() {
  static auto& only = *new Streams;  // never freed: threads use it until the process ends
  return only;
}

// A new stream that stands for the host.
inline c10::StreamId new_host_stream() {
  const std::lock_guard lock(streams().mutex);
  streams().queues.push_back(nullptr);
  return static_cast<c10::StreamId>(streams().queues.size() - 1);
}

inline c10::StreamId new_stream() {
  auto* const queue = new Queue;
  std::thread([queue] {
    at::set_num_threads(1);
    queue->run();
  }).detach();
  const std::lock_guard lock(streams().mutex);
  streams().queues.push_back(queue);
  return static_cast<c10::StreamId>(streams().queues.size() - 1);
}

// nullptr for streams of the host.
inline Queue* find_queue(c10::StreamId stream) {
  const std::lock_guard lock(streams().mutex);
  return streams().queues.at(static_cast<size_t>(stream));
}

inline Queue& queue_of(c10::StreamId stream) {
  auto* const queue = find_queue(stream);
  TORCH_INTERNAL_ASSERT(queue != nullptr);
  return *queue;
}

inline c10::Stream stream_with(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

inline c10::StreamId& current() {
  thread_local c10::StreamId stream = kDefault;
  return stream;
}

struct Event {
  Queue* queue = nullptr;
  int64_t place = 0;

  bool has_run() const { return queue == nullptr || queue->has_run(place); }
};

// The device guard of a device type with these streams.
struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_with(current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_with(kDefault); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_with(std::exchange(current(), stream.id()));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    auto* const queue = find_queue(stream.id());
    *static_cast<Event*>(*event) = {queue, queue == nullptr ? 0 : queue->end()};
  }
  bool queryEvent(void* event) const override { return static_cast<Event*>(event)->has_run(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

}  // namespace host_streams
