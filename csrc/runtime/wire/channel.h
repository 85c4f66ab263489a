// The messages of one group of ranks.
//
// States, and what holds in each:
//   open     Messages are sent and received. Each is told apart by its peer, slot and stage.
//   failed   For good. Each message that is not complete ends with the reason, and so do those that
//            begin later. If a message does not fit or a member says fail(), the messages of all
//            members end at once. Otherwise this member leaves: what it has sent still arrives, and
//            only members that wait for more of it fail, with the same reason.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "runtime/wire/frame.h"

namespace commhook::wire {

class Endpoint;

// Longer ones count as this.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

// Why a channel has failed.
struct Failure {
  enum class Kind : uint8_t {
    kEnded,    // the rank's process has ended
    kLost,     // nothing has come from the rank's host for too long
    kTimeout,  // this rank, or the one named, has waited too long; nobody needs to have ended
    kMisfit,   // the rank's message is not the one that was expected
    kTold,     // the rank has called fail()
    kLeft,     // the rank has left the group
    kClosed,   // this process has left it
  };
  Kind kind = Kind::kClosed;
  int rank = -1;  // in the group; of a rank that has left, which one it has blamed; -1: unknown
  std::string text;
  // What the others are told in place of the text, or what a rank has said that has left.
  std::string why = "";
};

// DistBackendError in Python.
class PeerError : public c10::DistBackendError {
 public:
  explicit PeerError(Failure failure);
  const Failure failure;
};

class Channel : public std::enable_shared_from_this<Channel> {
 public:
  // A message to or from a member. Of each slot and stage there is one in each direction between
  // two members, ever.
  struct Message {
    int peer;
    uint32_t slot;
    uint32_t stage;
    uint8_t* memory;
    size_t size;
  };
  struct Exchange {
    std::vector<Message> sends;
    std::vector<Message> receives;
    // A digest of what both sides must agree on besides the size.
    uint32_t form = 0;
    // What it is, for errors: "all-reduce 7 of float32".
    std::string what;
    // Keeps the memory until the exchange is over. Released without locks.
    std::shared_ptr<const void> owner;
    std::chrono::milliseconds timeout;
  };
  // Called once, without locks, when no memory is read or written any more: with null if the memory
  // of all receives is filled, else with a PeerError. It may be called before begin() returns, and
  // on the endpoint's thread, where it must not wait for anything.
  using Done = std::function<void(std::exception_ptr)>;

  // Joins a group. All members call this; it waits for all their addresses.
  //
  // store: the group's, of which this uses a key for each rank. name: the same on all members, and
  // no other group's. names: what texts call the ranks; empty: their numbers. is_held: after a
  // failure this member leaves with close(), and not by itself.
  // Errors: c10::DistStoreError if an address does not come in time.
  static std::shared_ptr<Channel> join(const std::shared_ptr<Endpoint>& endpoint,
                                       const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::string& name, int rank, int size,
                                       std::chrono::milliseconds timeout,
                                       std::vector<int64_t> names = {}, bool is_held = false);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;

  void begin(Exchange exchange, Done done);
  // Ends all messages on all members; their errors give this text as the reason.
  void fail(const std::string& why);
  // Leaves the group. Members that wait for more of this one fail with this reason.
  // kind, rank: the failure that they have then; rank: nothing: this one, -1: unknown.
  void close(const std::string& why = "", Failure::Kind kind = Failure::Kind::kLeft,
             std::optional<int> rank = std::nullopt);
  // Why the channel has failed, if it has.
  [[nodiscard]] std::optional<Failure> failure() const;

  // Runs a function on one of the process's threads for work that takes time, also after close().
  // has_waits: it waits for other such functions.
  void run(std::function<void()> function, bool has_waits = false);
  // Lets drain() wait for what the caller has begun, as long as it exists.
  [[nodiscard]] std::shared_ptr<const void> busy() const;
  // After close(): waits until no callback of an exchange and no such function runs. Returns
  // whether there was one; nothing if one still runs then. Returns false at once on a thread of
  // run().
  [[nodiscard]] std::optional<bool> drain(std::chrono::milliseconds longest) const;

 private:
  struct Inner;
  explicit Channel(std::shared_ptr<Inner> inner);
  std::shared_ptr<Inner> inner_;
  friend class Endpoint;
};

}  // namespace commhook::wire
