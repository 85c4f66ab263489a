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
//
// A trial sent 64 MB over loopback, on two busy cores. The figures are ratios to plain send and
// recv: rate, processor time for a GB, one-way time of 1 KB. Plain had 600 MB/s, 0.54 s and 12 µs.
//
// - A loop over epoll of our own, 1 MB at a time: 1.04, 1.06, 1.19; with CRC-32C at both ends 0.76,
//   1.30, 1.21.
// - The same with TLS 1.3 and a pre-shared key of OpenSSL 3.0: 0.28, 3.8, 2.0. Loopback outruns
//   AES-GCM.
// - Asio: 0.97, 1.02, 1.51; with TLS 0.19, 4.8, 2.4. It is linked with OpenSSL when it is built.
// - libuv: 0.93, 1.05, 1.71. It has no TLS.
// - libzmq: 0.32, 3.1, 3.7; with CURVE 0.09, 11, 5.3. It lost messages in silence when a connection
//   broke.
// - UCX: 0.46, 2.2, 1.5. It does not encrypt. A reset connection ends its requests with an error.
// - picoquic (QUIC): 0.04, 23, 7.5. It takes no external pre-shared key, and copies what it
//   receives.
//
// So the loop and the sockets are our own. What is sent again after a break would be ours in any
// case.
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
