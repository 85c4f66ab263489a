// The messages of one group of ranks.
//
// States, and what holds in each:
//   open     Messages are sent and received. Each is told apart by its peer, slot and stage.
//   failed   For good: a member has ended, was lost, has waited too long or has said fail(). All
//            members that this process reaches are told why. Each message ends with the reason.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
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
    kClosed,   // this process has closed the channel
  };
  Kind kind = Kind::kClosed;
  int rank = -1;  // in the group
  std::string text;
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
  // no other group's.
  // Errors: c10::DistStoreError if an address does not come in time.
  static std::shared_ptr<Channel> join(const std::shared_ptr<Endpoint>& endpoint,
                                       const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::string& name, int rank, int size,
                                       std::chrono::milliseconds timeout);
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  ~Channel();

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;

  void begin(Exchange exchange, Done done);
  // Ends all messages on all members; their errors give this text as the reason.
  void fail(const std::string& why);
  // Ends all messages on this rank alone, without telling anybody.
  void close();
  // Why the channel has failed; null if it has not.
  [[nodiscard]] std::exception_ptr failure() const;

  // Runs a function on one of the process's threads for work that takes time or waits, also after
  // close().
  void run(std::function<void()> function);

 private:
  struct Inner;
  explicit Channel(std::shared_ptr<Inner> inner);
  std::shared_ptr<Inner> inner_;
  friend class Endpoint;
};

}  // namespace commhook::wire
