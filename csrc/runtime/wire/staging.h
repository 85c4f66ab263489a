// Copies between tensors on a device and memory of the host, beside the device's other work.
//
// Each device has two streams for them, one in each direction, and one thread that waits until
// copies to the host are there. So neither the caller nor the stream of the gradients waits.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace commhook::wire {

class Staging {
 public:
  using Then = std::function<void(std::exception_ptr)>;

  // Of a device, for good.
  static Staging& on(at::Device device);
  // Memory of the host for a tensor's elements, flat. On CUDA it is pinned, and kept for later.
  static at::Tensor memory(const at::Tensor& tensor);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  [[nodiscard]] at::Device device() const { return device_; }
  // Where the present work of the caller's stream ends.
  [[nodiscard]] c10::Event now() const;
  // Copies a tensor to memory of the host, after the present work of the caller's stream. Both must
  // exist until when_fetched() calls.
  void fetch(const at::Tensor& from, const at::Tensor& to) const;
  // Calls when all copies that fetch() has begun are there, or with an error of the device: on one
  // thread, in the order of the calls. It must not wait for other functions of this kind.
  void when_fetched(Then then);
  // The stream on which put() copies to the device.
  [[nodiscard]] const c10::Stream& writing() const { return writing_; }
  // Copies flat memory of the host to a tensor on the device. The current stream is writing().
  void put(const at::Tensor& to, const at::Tensor& from) const;
  // The caller's stream on the device.
  [[nodiscard]] c10::Stream current() const;

 private:
  explicit Staging(at::Device device);
  void serve();

  const at::Device device_;
  const c10::Stream fetching_;
  const c10::Stream writing_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<c10::Event, Then>> waiting_;
  bool has_thread_ = false;
};

}  // namespace commhook::wire
