// Exchanges over Gloo that use both directions of a link at once.
#pragma once

#include <ATen/core/ivalue.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace commhook {

// Those that are issued one after another, in the same order on all ranks. For each other rank a
// thread waits for what goes there and comes from there, while there is anything; so that an
// exchange fails as soon as one rank is lost. The last of them completes the exchange's Future, and
// runs what waits for that.
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
    c10::intrusive_ptr<c10::ivalue::Future> done;
    at::Tensor result;
    size_t missing = 0;  // ranks with which it is not over
    bool ended = false;
  };
  // What goes to one other rank and comes from it.
  struct Lane {
    std::deque<std::pair<Works, std::shared_ptr<Exchange>>> under_way;
    std::thread::id runner;  // that waits for them; none while there are none
  };

  // Of an exchange among so many ranks, which have their lanes from then on.
  int next_tag(int size);
  void add(std::vector<std::pair<int, Works>> parts, Exchange exchange);
  void run(Lane& lane);

  const bool is_second_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<Lane> lanes_;  // by rank
  bool stopped_ = false;
  uint32_t count_ = 0;
};

}  // namespace commhook
