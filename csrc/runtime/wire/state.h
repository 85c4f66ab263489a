// What endpoint.cpp and channel.cpp share: the state of an endpoint.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/wire/address.h"
#include "runtime/wire/channel.h"
#include "runtime/wire/endpoint.h"
#include "runtime/wire/link.h"
#include "runtime/wire/tls.h"

namespace commhook::wire {

// The refusal of a process that counts another one as lost.
inline constexpr const char* kLostText = "it counts this process as lost";

// The refusal of a process with another token, or with one where this process has none.
inline constexpr const char* kTokenText = "they have different tokens, or only one has one";

// Threads for what takes time or waits: as many as run at the same time, with a limit.
class Workers {
 public:
  // has_waits: the function waits for others. Threads for these are not among the most.
  void run(std::function<void()> function, bool has_waits = false);
  // Waits until no function is left.
  void finish(std::chrono::seconds longest);
  // In a child of fork(), which has none of the threads.
  void forget() { shared_ = std::make_shared<Shared>(); }
  // Whether this thread is one of them.
  static bool is_one();

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> functions;
    size_t threads = 0;
    size_t idle = 0;
    size_t open = 0;     // functions that wait or run
    size_t waiting = 0;  // those of them that have waits
  };
  static void serve(const std::shared_ptr<Shared>& shared, bool stays);
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

struct Connection {
  int fd = -1;
  uint64_t number = 0;  // of all connections
  uint64_t peer = 0;    // 0: no greeting has come
  size_t rail = 0;
  bool is_own = false;         // this process has made it
  bool is_connecting = false;  // and it is not there yet
  bool wants_write = false;
  Time since = 0;
  std::vector<uint8_t> head;  // what has come before it is known whose it is
  std::unique_ptr<TlsSession> tls;
};

struct Peer {
  Address address;
  std::unique_ptr<Link> link;
  std::vector<Connection*> connections;  // by rail; null: none
  bool is_needed = false;
  bool has_news = false;  // is in State::news
  Time next_try = 0;
  Time pause = 0;  // before another try
};

struct Group {
  uint64_t digest = 0;
  int rank = 0;
  std::vector<uint64_t> members;     // identities, by rank
  std::vector<int64_t> names;        // of ranks in texts
  std::map<uint64_t, Failure> left;  // of the members, with what they have said of it
  std::optional<Failure> failure;
  bool is_held = false;
  bool has_left = false;
};

// An exchange that is not over.
struct Pending {
  std::shared_ptr<Group> group;
  Channel::Exchange exchange;
  Channel::Done done;
  std::vector<bool> is_open;  // of the sends, then of the receives
  size_t open = 0;
  Time deadline = 0;
};

// What to call without the mutex.
struct Call {
  Channel::Done done;
  std::exception_ptr error;
  std::shared_ptr<const void> owner;  // of memory that is no longer used
};
using Calls = std::vector<Call>;
inline void make(Calls& calls) {
  for (auto& each : calls) {
    each.done(each.error);
  }
}

struct State {
  explicit State(Endpoint::Options options);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  static Time now();
  void loop();
  void close_in_child();

  // All others: with the mutex.
  // ---- endpoint.cpp
  Peer& peer(const Address& address);
  void need(Peer& peer, Time now);
  void flush(Peer& peer, Time now);
  void handle(uint64_t number, uint32_t events, Time now);
  void accept_all(Time now);
  void listen_from_now(bool listens);
  void connect(Peer& peer, size_t rail, Time now);
  void connected(Connection& connection, Time now);
  void not_connected(Connection& connection, int error, Time now);
  // As recvmsg() and sendmsg(). Bytes that do not fit TLS are EPROTO.
  ssize_t receive(Connection& connection, const iovec* spans, size_t count, bool may_read);
  ssize_t transmit(Connection& connection, const iovec* spans, size_t count);
  [[nodiscard]] bool send_tls(Connection& connection) const;
  void refuse(Connection& connection, const char* text);
  void read(Connection& connection, Time now);
  void read_head(Connection& connection, Time now);
  bool take_head(Connection& connection, Time now);
  bool feed(Connection& connection, const uint8_t* data, size_t size, Time now);
  void write(Connection& connection, Time now);
  void close(Connection& connection, Time now);
  bool watch(int operation, int fd, uint64_t number, uint32_t events) const;  // by epoll
  void watch(Connection& connection, bool for_writing);
  void tick(Time now);
  void touch(Peer& peer);
  [[nodiscard]] bool is_acknowledged() const;
  [[nodiscard]] bool owes_acknowledgement() const;

  // ---- channel.cpp
  void settle(Calls& calls);
  void take(const Link::Completion& completion, Peer& peer, Calls& calls);
  void take(const Link::Notice& notice, Peer& peer, Calls& calls);
  void fail(Group& group, Failure failure, Calls& calls);
  void leave(Group& group, const Failure& failure);
  void find_late(Time now, Calls& calls);
  void find_left(Group& group, Calls& calls);

  const Endpoint::Options options;
  const std::unique_ptr<const Tls> tls;  // null without a token
  std::string address;                   // as text
  uint64_t id = 0;
  Workers workers;
  std::thread thread;

  mutable std::mutex mutex;
  bool is_forked = false;
  Time stop_at = 0;  // 0: not asked to stop
  int listener = -1;
  bool is_deaf = false;  // no descriptor is left for another connection
  int poll = -1;
  int wake = -1;
  uint64_t last_number = 1;
  std::map<uint64_t, Connection> connections;  // by number
  std::map<uint64_t, Peer> peers;              // by identity
  std::vector<Peer*> news;                     // with completions or notices to take
  std::map<uint64_t, std::shared_ptr<Group>> groups;
  // What others have said of groups that this process has not joined yet, with who has said it.
  std::map<uint64_t, std::vector<std::pair<uint64_t, Link::Notice>>> unclaimed;
  std::map<uint64_t, Pending> pending;  // by the first of the numbers of its messages
  uint64_t next_message = 1;
  Time next_tick = 0;
  Endpoint::Counts counts;
};

}  // namespace commhook::wire
