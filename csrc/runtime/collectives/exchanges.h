// Exchanges over Gloo that use both directions of a link at once.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace commhook {

// Issues the receive of a message that comes later, hidden from PyTorch's profiler. The Work may
// end under another profile than the one it began under. An event of the profiler would then be in
// the memory of the first profile, which is gone.
c10::intrusive_ptr<c10d::Work> ask_early(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const at::Tensor& output, int rank, int tag);

// Exchanges among all ranks, issued one after another in the same order on all ranks. One thread
// for each other rank waits for the messages to and from it, so that an exchange fails as soon as
// one rank is lost. The last of these threads completes the exchange's Future and runs its
// callbacks.
class Exchanges : public std::enable_shared_from_this<Exchanges> {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Messages to higher ranks use the connections of `up`, messages to lower ranks those of `down`;
  // both groups have the same ranks. Each connection then carries data in one direction only, so
  // control messages in the other direction never queue behind data. The groups are not kept. Two
  // Exchanges may share groups if only one of them `is_second`. If a thread of Gloo calls start(),
  // a separate thread issues the messages of the second, since Gloo's threads must not hold the
  // group. `names` are the ranks' names in errors; if empty, their numbers in the groups.
  Exchanges(const Group& up, const Group& down, bool is_second, std::vector<int64_t> names = {});

  // Reserves a place in the order of exchanges, for an exchange that starts later. All ranks
  // reserve in the same order. Reserved exchanges may start in any order, on any thread.
  int64_t reserve();

  // Issues the receives of `outputs[r]` from each rank r early, so that a rank can send as soon as
  // its message is ready. Call start() later with the same memory, place and stage; or never, after
  // a failure: the receives are kept until stop(). A failed connection is not reported here but by
  // the Future of start(). Called without the GIL.
  void expect(std::vector<at::Tensor> outputs, int64_t place, int64_t stage);

  // Sends `inputs[r]` to each rank r, and receives `outputs[r]` from it: flat bytes on the CPU. The
  // caller copies its own part. Returns a Future of `result`, or of the error. Each place has two
  // stages, 0 and 1; each is started once. Called without the GIL.
  c10::intrusive_ptr<c10::ivalue::Future> start(std::vector<at::Tensor> inputs,
                                                std::vector<at::Tensor> outputs, at::Tensor result,
                                                int64_t place, int64_t stage);

  // Returns when the messages have arrived or are sent that the caller has issued itself on `up`:
  // works[i] is one to or from ranks[i]. Throws if a connection is lost. Gloo does not report that
  // to a send that waits for its turn on the connection, nor to a receive of which a part has come:
  // they would wait until the timeout. Called without the GIL.
  void finish_messages(const std::vector<int>& ranks,
                       const std::vector<c10::intrusive_ptr<c10d::Work>>& works);

  // For places that are reserved from now on, messages to lower ranks use the connections of
  // `down`. All ranks call it between the same two places.
  void use_down(const Group& down);

  // For places that are reserved from now on, a large message is cut into as many pieces as there
  // are connections. These are the first ones, and those of further groups over the same ranks;
  // ups[i] and downs[i] form a pair. All ranks call it between the same two places, with no
  // exchange in flight.
  void use_more(const std::vector<Group>& ups, const std::vector<Group>& downs);

  // Returns when no exchange is in flight. Returns at once on a thread that waits for messages,
  // which would otherwise wait for itself. Called without the GIL.
  void finish();

  // Makes the exchanges in flight fail, and all later ones. Returns when none is in flight and no
  // other thread runs callbacks of one. Called without the GIL.
  void stop();

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Works = std::vector<WorkPtr>;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  struct Messages {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    at::Tensor result;
    FuturePtr done;
    int64_t place;
    int tag;
  };
  // Other ranks, each with its messages in flight.
  using Parts = std::vector<std::pair<int, Works>>;
  struct Expected {
    std::vector<at::Tensor> outputs;
    Parts parts;
  };
  struct Exchange {
    FuturePtr done;
    at::Tensor result;
    size_t missing = 0;  // ranks with messages in flight
    bool ended = false;
  };
  // A receive for a message that never comes, on one connection. Gloo reports a lost connection to
  // a receive that has not begun, but not to one that has received a part.
  struct Watched {
    WorkPtr work;
    bool is_there = false;
    std::thread::id watcher;  // the thread that waits for it
  };
  // The groups for the messages in each direction.
  struct Connection {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> up;
    c10::weak_intrusive_ptr<c10d::ProcessGroup> down;

    Connection(const Group& up, const Group& down) : up(up), down(down) {}
  };
  // The messages to and from one other rank.
  struct Lane {
    std::deque<std::pair<Works, std::shared_ptr<Exchange>>> under_way;
    Works awaited;            // the messages that finish_messages() waits for
    std::thread::id runner;   // waits for them; none before the first message
    bool is_telling = false;  // whether it runs callbacks
    int64_t ended = 0;        // the number of its exchanges that have ended
    std::condition_variable added;
    std::deque<Watched> watched;  // one for each connection; the addresses are stable
    Watched up;                   // of watch_up(), if none of these is for that connection
    std::exception_ptr lost;      // the error that a watcher received
  };
  // The outcome of issuing an exchange.
  struct Outcome {
    bool is_over;
    std::exception_ptr error;
  };

  void issue_all();
  Outcome issue(const Messages& messages);
  static void tell(c10::ivalue::Future& done, const Outcome& outcome, const at::Tensor& result);
  // Returns whether there was nothing to send.
  bool post(const Messages& messages);
  std::vector<std::pair<Group, Group>> groups(int64_t place);  // `up` and `down` of each connection
  // Sets the connections for places that are reserved from now on.
  void use(std::vector<Connection> connections);
  // Cuts a message into pieces, each for its own connection.
  static std::vector<at::Tensor> pieces(const at::Tensor& message, size_t connections);
  // Issues the receives, and adds a part for each other rank.
  void ask(const std::vector<at::Tensor>& outputs, int64_t place, int tag, Parts& parts);
  // The receives that expect() has issued; empty if it was not called.
  Parts take_expected(const Messages& messages);
  int tag_of(int64_t place, int64_t stage) const;
  void watch(int rank, size_t connection, const Group& group);
  // As above, on the connection of `up`, which finish_messages() uses in both directions.
  void watch_up(int rank, const Group& up, const Group& down);
  void watch_with(int rank, Watched& watched, const Group& group);
  void add(Parts parts, std::shared_ptr<Exchange> exchange);
  void run(Lane& lane);
  void run_watcher(Lane& lane, Watched& watched);
  bool finish_message(Lane& lane, const WorkPtr& work);
  // Aborts the messages of finish_messages() on lost connections, after a while.
  void abort_later();
  static void abort_all(const Lane& lane);  // ends the waits for all messages of a lane
  // Returns the result of `call`, which issues a message to or from a rank. Its errors name the
  // rank.
  template <typename Call>
  WorkPtr with(int rank, const Call& call) const;
  // Adds the name of a lane's rank to an error.
  std::exception_ptr named(const Lane& lane, const std::exception_ptr& error) const;

  // Connections, with the first place that uses them: receive and send of a message use the same
  // ones.
  std::vector<std::pair<int64_t, std::vector<Connection>>> connections_;
  const int size_;
  const int rank_;
  const bool is_second_;
  const std::vector<int64_t> names_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<Lane> lanes_;  // by rank
  std::deque<Messages> to_issue_;
  std::thread::id issuer_;  // the thread that issues them; none if there are none
  int issuing_ = 0;         // threads that do so now
  // The Works of failed exchanges. Their other messages may still be in flight; a connection cannot
  // carry further messages once the memory of one in flight is freed.
  std::vector<Works> failed_;
  std::map<int, Expected> expected_;  // by tag
  bool stopped_ = false;
  int64_t reserved_ = 0;
};

}  // namespace commhook
