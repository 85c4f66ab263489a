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

// Asks a rank for a message that comes later. PyTorch's profiler does not see it: the message may
// come, or be given up, when another profile is taken than when it was asked for. An event that a
// Work ends then is memory of the first profile, which is gone.
c10::intrusive_ptr<c10d::Work> ask_early(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const at::Tensor& output, int rank, int tag);

// Those that are issued one after another, in the same order on all ranks. For each other rank a
// thread waits for what goes there and comes from there, while there is anything; so that an
// exchange fails as soon as one rank is lost. The last of them completes the exchange's Future, and
// runs what waits for that.
class Exchanges : public std::enable_shared_from_this<Exchanges> {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Messages to higher ranks take the connections of `up`, those to lower ranks the ones of `down`,
  // over the same ranks: a connection that carries messages in one direction carries their
  // receiver's words about them in the other, with no message before them. The groups are not kept.
  // Two Exchanges may have the same, if only one `is_second`. Its messages are issued by a thread
  // of its own where start() is called by a thread of Gloo's, which must not hold the group.
  // `names` are what errors call the ranks; none for their places in the groups.
  Exchanges(const Group& up, const Group& down, bool is_second, std::vector<int64_t> names = {});

  // A place in the order of exchanges, for an exchange that is started later. All ranks take theirs
  // in the same order. What is started in a place may be started in any order, by any thread.
  int64_t reserve();

  // Asks each rank r for what is to come to `outputs[r]`, so that it need not wait for that when it
  // has the message. start() is called later, with the same memory, place and stage; or never, if
  // something fails: what was asked for is kept until stop(). A connection that has failed is left
  // to start(), whose Future tells. Called without the GIL.
  void expect(std::vector<at::Tensor> outputs, int64_t place, int64_t stage);

  // Sends `inputs[r]` to each rank r, and gets `outputs[r]` from it: flat bytes on the CPU. What
  // goes to this rank itself is for the caller to copy. A Future of `result`, or of what has
  // failed. Each place has two stages, 0 and 1, and each is started once. Called without the GIL.
  c10::intrusive_ptr<c10::ivalue::Future> start(std::vector<at::Tensor> inputs,
                                                std::vector<at::Tensor> outputs, at::Tensor result,
                                                int64_t place, int64_t stage);

  // In places that are reserved from now on, messages to lower ranks take the connections of
  // `down`. All ranks call it between the same two places.
  void use_down(const Group& down);

  // In places that are reserved from now on, large messages are cut into as many pieces as there
  // are connections: those that there were from the start, and more, of groups over the same ranks:
  // each of `ups` with the one of `downs` in its place. All ranks call it between the same two
  // places, with none under way.
  void use_more(const std::vector<Group>& ups, const std::vector<Group>& downs);

  // Returns when none is under way. At once on a thread that waits for messages, which would wait
  // for itself. Called without the GIL.
  void finish();

  // Lets those under way fail, and all that come later. Returns when none is under way and nobody
  // runs what waits for one, but for the caller. Called without the GIL.
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
  // Other ranks, each with what is under way between it and this one.
  using Parts = std::vector<std::pair<int, Works>>;
  struct Expected {
    std::vector<at::Tensor> outputs;
    Parts parts;
  };
  struct Exchange {
    FuturePtr done;
    at::Tensor result;
    size_t missing = 0;  // ranks with which it is not over
    bool ended = false;
  };
  // A message that never comes, on one connection. Of a message that is halfway there Gloo says
  // nothing when the connection is lost, of one that has not begun it does.
  struct Watched {
    WorkPtr work;
    bool is_there = false;
    std::thread::id watcher;  // that waits for it
  };
  // Two groups, of the messages in each direction.
  struct Connection {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> up;
    c10::weak_intrusive_ptr<c10d::ProcessGroup> down;

    Connection(const Group& up, const Group& down) : up(up), down(down) {}
  };
  // What goes to one other rank and comes from it.
  struct Lane {
    std::deque<std::pair<Works, std::shared_ptr<Exchange>>> under_way;
    std::thread::id runner;   // that waits for them; none before the first
    bool is_telling = false;  // runs what waits for one
    std::condition_variable added;
    std::deque<Watched> watched;  // connections, which do not move
    std::exception_ptr lost;      // what a watcher has been told
  };
  // Of what has been issued.
  struct Outcome {
    bool is_over;
    std::exception_ptr error;
  };

  void issue_all();
  Outcome issue(const Messages& messages);
  static void tell(c10::ivalue::Future& done, const Outcome& outcome, const at::Tensor& result);
  // Whether there was nothing to send.
  bool post(const Messages& messages);
  std::vector<std::pair<Group, Group>> groups(int64_t place);  // `up` and `down` of connections
  // Changes what places have that are reserved from now on.
  void use(std::vector<Connection> connections);
  // Pieces of a message, of which each takes a connection of its own.
  static std::vector<at::Tensor> pieces(const at::Tensor& message, size_t connections);
  // Adds a part for each other rank, which has been asked for its message.
  void ask(const std::vector<at::Tensor>& outputs, int64_t place, int tag, Parts& parts);
  // What was asked for already; nothing if nothing was.
  Parts take_expected(const Messages& messages);
  int tag_of(int64_t place, int64_t stage) const;
  void watch(int rank, size_t connection, const Group& group);
  void add(Parts parts, std::shared_ptr<Exchange> exchange);
  void run(Lane& lane);
  void run_watcher(Lane& lane, Watched& watched);
  // What `call` gives, which issues a message to or from a rank. What it throws names the rank.
  template <typename Call>
  WorkPtr with(int rank, const Call& call) const;
  // An error of messages with the rank of a lane, which it names.
  std::exception_ptr named(const Lane& lane, const std::exception_ptr& error) const;

  // From which place on which connections: a message is asked for and sent on the same ones.
  std::vector<std::pair<int64_t, std::vector<Connection>>> connections_;
  const int size_;
  const int rank_;
  const bool is_second_;
  const std::vector<int64_t> names_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<Lane> lanes_;  // by rank
  std::deque<Messages> to_issue_;
  std::thread::id issuer_;  // that issues them; none while there are none
  int issuing_ = 0;         // threads that do
  // Of exchanges that have failed: their other messages may still be on their way, and a connection
  // whose message has lost its memory can carry no other.
  std::vector<Works> failed_;
  std::map<int, Expected> expected_;  // by tag
  bool stopped_ = false;
  int64_t reserved_ = 0;
};

}  // namespace commhook
