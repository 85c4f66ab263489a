// Operations of a group: rounds of messages, and what is computed after each.
//
// An operation is made in two parts. First it is written down, with all memory that it needs; this
// may throw. Then begin() sends its first messages, and each round begins where the one before has
// ended: on the endpoint's thread, which computes what is small, or on one for long work.
//
// All of this works with memory of the host. For tensors on a device, the first messages begin when
// the device has made the inputs and copied them, and the results are copied to it at last.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "runtime/python/torch_release.h"
#include "runtime/wire/channel.h"
#include "runtime/wire/staging.h"

namespace commhook::wire {

using Tensors = std::vector<at::Tensor>;

// What an operation is to its caller.
struct Request {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::string name;   // the same on all of its ranks, as is `of`
  std::string of;     // what it is about: "1000 float32"
  std::string where;  // for errors alone
  std::chrono::milliseconds timeout{0};
  std::vector<Tensors> outputs;
  Tensors inputs;
  uint64_t number = 0;  // in the group, or between two ranks
  std::string place;    // which texts say in place of the number
  int source = -1;      // of a receive

  [[nodiscard]] std::string text() const;
};

class WireWork : public c10d::Work {
 public:
  // staging: of the results' device; null for the CPU.
  WireWork(std::shared_ptr<Channel> channel, Request request, const Staging* staging);

  // Without a timeout, waits until the operation ends, by the group's timeout at the latest. Then
  // the caller's stream waits for the results on a device.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override;
  int sourceRank() const override { return request_.source; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return request_.number; }
  void abort() override;
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
  std::chrono::milliseconds getTimeout() const override { return request_.timeout; }
#endif

  // Whether it is over by then.
  bool is_over_by(std::chrono::steady_clock::time_point deadline);
  // Called once, after all copies to a device were put on its stream. Callbacks of the Future run
  // on a thread of the channel.
  void complete(const std::exception_ptr& error);
  [[nodiscard]] const Request& request() const { return request_; }

 private:
  void fill(c10::ivalue::Future& future) const;

  const std::shared_ptr<Channel> channel_;
  const Request request_;
  const Staging* const staging_;
  std::optional<c10::Event> written_;  // under mutex_, as is
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  explicit Operation(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

  [[nodiscard]] int rank() const { return channel_->rank(); }
  [[nodiscard]] int size() const { return channel_->size(); }
  [[nodiscard]] std::vector<int> others() const;

  // The elements of a tensor, in order; its own memory if they lie there so.
  static at::Tensor elements(const at::Tensor& tensor);
  // The same in memory of the host: that of elements(), or another one, which has them when the
  // first messages begin.
  at::Tensor input(const at::Tensor& tensor);
  // Memory of the host for the elements of tensors of one dtype, one tensor after the other. At
  // last, they are written to the tensors, if they are not in the memory of one.
  // is_read: whether it has the tensors' values first, as for input().
  at::Tensor output(const Tensors& tensors, bool is_read = false);
  // Copies within memory of input() and output(), before the first messages.
  void copy(const at::Tensor& to, const at::Tensor& from);

  // The stages of the patterns that follow begin with this one.
  void base(uint32_t stage) { base_ = stage_ = stage; }
  // The messages that follow have this stage: one in each direction between two ranks.
  void stage(uint32_t stage) { stage_ = base_ + stage; }
  // The messages that follow begin when all before are over.
  void round() { steps_.emplace_back(); }
  // Computes when the messages before are over; `bytes` says how much. A round.
  void then(size_t bytes, std::function<void()> compute);
  // A tensor that is not defined has no bytes.
  void send(int peer, const at::Tensor& tensor);
  void receive(int peer, const at::Tensor& tensor);
  // Both, even if one has no bytes: each rank notices if the other one does something else.
  void exchange(int peer, const at::Tensor& sent, const at::Tensor& received);

  c10::intrusive_ptr<WireWork> begin(Request request);

 private:
  struct Step {
    std::vector<Channel::Message> sends;
    std::vector<Channel::Message> receives;
    std::function<void()> compute;
    size_t bytes = 0;
  };

  // Memory of the host for flat elements; null if that is theirs.
  at::Tensor staged(const at::Tensor& flat, bool is_read);
  void write_results();
  Channel::Message message(int peer, const at::Tensor& tensor, void* memory);
  void go_on();
  // Whether the step is over already; else it calls go_on() later.
  bool exchanged(Step& step);
  bool computed(Step& step);
  void compute(const Step& step);
  void finish();

  const std::shared_ptr<Channel> channel_;
  c10::intrusive_ptr<WireWork> work_;
  std::vector<Step> steps_{1};
  size_t next_ = 0;                                               // in steps_
  Tensors tensors_;                                               // of the messages
  using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;  // to, from
  Copies first_;                                                  // before the first messages
  Copies puts_;                                                   // at last, to the device
  Copies copies_;                                                 // after these
  Staging* staging_ = nullptr;                                    // if tensors are on a device
  std::optional<c10::Event> begun_;                               // of the caller's stream there
  bool has_fetched_ = false;
  uint32_t base_ = 0;
  uint32_t stage_ = 0;
  std::exception_ptr error_;
  std::atomic<int> open_{0};  // of a step's messages: begin() and its callback
};

}  // namespace commhook::wire
