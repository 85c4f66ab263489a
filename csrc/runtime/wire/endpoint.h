// The connections of this process to all others, and the thread that serves them.
//
// What holds:
//   - One mutex guards all links and channels. Nothing waits while it is held, and no function of a
//     user is called. Only the thread reads from sockets; whoever sends also writes.
//   - Each process connects to those of which it expects a message or for which it has one, again
//     when a connection breaks. Of two connections that both begin at the same time, that of the
//     process with the smaller identity stays.
//   - A connection is of nobody until a greeting has come that names a member of a channel here.
//   - A child of fork() has no connections: they are closed there at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/wire/frame.h"

namespace commhook::wire {

struct State;

class Endpoint {
 public:
  struct Options {
    // An address, a name or an interface to listen at; "": the host's own address.
    std::string host;
    // Processes of other versions are refused.
    std::string version;
    // A host without a sign for so long is lost.
    Time lost_after = 15 * kSecond;
    // The number of connections to each process.
    size_t rails = 1;
    // With Tls::kKeyBytes bytes: all connections are encrypted, and only processes with the same
    // key have one.
    std::string key = "";
  };
  // Since the start.
  struct Counts {
    uint64_t sent_bytes = 0;  // with headers, and with what was sent again
    uint64_t received_bytes = 0;
    uint64_t sent_messages = 0;
    uint64_t received_messages = 0;
    uint64_t connections = 0;  // that were opened
    uint64_t broken = 0;       // of these
  };

  // Listens. Errors: c10::DistNetworkError if it cannot.
  explicit Endpoint(Options options);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  // Begins what the destructor waits for.
  void stop();
  // Sends what is left to send, for at most five seconds; then ends the connections and the thread.
  ~Endpoint();

  // What other processes need to reach this one.
  [[nodiscard]] std::string address() const;
  [[nodiscard]] Counts counts() const;
  // Whether another process was lost, which is for good, though it may run.
  [[nodiscard]] bool has_lost() const;
  // Whether a group has joined with it and not left.
  [[nodiscard]] bool has_groups() const;
  // Closes all connections, as if their cables were cut; they are made again. For tests.
  void cut();

 private:
  friend class Channel;
  std::shared_ptr<State> state_;
};

}  // namespace commhook::wire
