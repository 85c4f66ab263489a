// Collectives among the ranks of a channel with places in an order, any number of them at once.
// They start in any order.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/wire/channel.h"
#include "runtime/wire/operation.h"

namespace commhook::wire {

class Exchanges {
 public:
  static constexpr int64_t kOrders = 8;

  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // generation: of the channel, so that places of an earlier one are refused.
  Exchanges(std::shared_ptr<Channel> channel, int64_t generation)
      : channel_(std::move(channel)), generation_(generation) {}
  Exchanges(const Exchanges&) = delete;
  Exchanges& operator=(const Exchanges&) = delete;
  ~Exchanges() { channel_->close(); }  // it may have memory of messages that nobody has started

  // Reserves a place in an order, for what starts later. All ranks reserve in the same order; they
  // may start in any order, on any thread. order: which one, below kOrders.
  int64_t reserve(int64_t order);

  // Gives memory to messages of an exchange before it starts: a large one then comes at once, and
  // none is copied. Nothing is thrown but for wrong arguments: start() reports failures.
  void expect(Tensors outputs, int64_t place, int64_t stage, std::chrono::milliseconds timeout,
              const std::string& form = "");

  // Sends `inputs[r]` to each rank r, and receives `outputs[r]` from it: flat bytes, all on the CPU
  // or on one device. The caller copies its own part. The Future has `result`, or the error; its
  // callbacks run on a thread of the channel. Each place has two stages, 0 and 1; each is started
  // once.
  // form: of the messages, such as the codec's name. If it is another on a rank, all get an error.
  FuturePtr start(Tensors inputs, Tensors outputs, at::Tensor result, int64_t place, int64_t stage,
                  std::chrono::milliseconds timeout, const std::string& form = "");

  // Gathers `parts`, one of each rank, of which this rank has written its own: flat bytes. Once in
  // a place. The Future is as that of start().
  FuturePtr gather(const Tensors& parts, at::Tensor result, int64_t place,
                   std::chrono::milliseconds timeout, const std::string& form = "");
  // Sums a flat tensor over the ranks, or takes the maximum, and writes it there.
  // Floating-point numbers of 16 bits are summed in float32 among few ranks. As gather().
  FuturePtr reduce(const at::Tensor& tensor, bool takes_maximum, at::Tensor result, int64_t place,
                   std::chrono::milliseconds timeout);

 private:
  struct Part;
  struct Started;
  using Stage = std::pair<int64_t, int64_t>;  // the place, and which of its stages
  struct Expected {
    Tensors outputs;
    Tensors memory;  // of the host, for them
    std::shared_ptr<Part> part;
  };

  void check(const Tensors& messages, const Stage& stage, const char* name) const;
  // Of memory of the host.
  static void begin(Channel& channel, const Tensors* inputs, const Tensors* outputs,
                    const Stage& stage, std::chrono::milliseconds timeout, const std::string& form,
                    const std::shared_ptr<Part>& part);
  [[nodiscard]] bool is_of_another_step(int64_t place) const;
  // Memory of the host for messages to or from other ranks.
  [[nodiscard]] Tensors memory_for(const Tensors& messages) const;
  static void fetch_all(Started& whole);
  FuturePtr run(Operation& operation, Request request, at::Tensor result, int64_t place,
                std::chrono::milliseconds timeout) const;
  [[nodiscard]] static std::string name_of(int64_t place);

  const std::shared_ptr<Channel> channel_;
  const int64_t generation_;
  std::array<std::atomic<int64_t>, kOrders> reserved_{};
  std::mutex mutex_;
  std::map<Stage, Expected> expected_;
};

}  // namespace commhook::wire
