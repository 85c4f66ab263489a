// Exchanges over Gloo that use both directions of a link at once.
#pragma once

#include <ATen/core/ivalue.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace commhook {

// Those that are issued one after another, in the same order on all ranks. A thread waits for them
// while there are any, completes their Futures in that order, and runs what waits for these.
class Exchanges : public std::enable_shared_from_this<Exchanges> {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Two may be under way on the same groups, if only one `is_second`.
  explicit Exchanges(bool is_second) : is_second_(is_second) {}

  // Sends `inputs[r]` to each rank r, and gets `outputs[r]` from it: flat bytes on the CPU. What
  // goes to this rank itself is for the caller to copy. Messages to higher ranks take the
  // connections of `up`, those to lower ranks the ones of `down`, over the same ranks: a connection
  // that carries messages in one direction carries their receiver's words about them in the other,
  // with no message before them. A Future of `result`, or of what has failed. Called without the
  // GIL.
  c10::intrusive_ptr<c10::ivalue::Future> start(const Group& up, const Group& down,
                                                const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& outputs,
                                                const at::Tensor& result);

  // Lets those under way fail, and all that come later. Returns when none is under way and nobody
  // runs what waits for one, but for the caller. Called without the GIL.
  void stop();

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  struct Exchange {
    Works works;
    c10::intrusive_ptr<c10::ivalue::Future> done;
    at::Tensor result;
  };

  int next_tag();
  void add(Exchange exchange);
  void run();

  const bool is_second_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<Exchange> under_way_;
  std::thread::id runner_;  // that waits for them; none while there are none
  bool stopped_ = false;
  uint32_t count_ = 0;
};

}  // namespace commhook
