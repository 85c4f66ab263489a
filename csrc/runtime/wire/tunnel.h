// Carries the connections of a program that does not encrypt, such as a TCPStore's, over TLS.
//
// One end is in the process of a store, at the address that others reach: it accepts TLS, and
// continues each proven connection to the store. The other end is in the process of a client, at a
// port of its own host: it accepts what the client connects, and continues it with TLS.
//
// What holds:
//   - No byte goes on before both sides are proven, and none that TLS has not accepted.
//   - Of each connection at most kMostWaiting bytes in each direction, and what one read has
//     brought, wait here.
//   - At most kMostUnproven connections are unproven, none for longer than kLongestUnproven.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/wire/address.h"
#include "runtime/wire/frame.h"
#include "runtime/wire/tls.h"

namespace commhook::wire {

class Tunnel {
 public:
  // listener: a socket that listens, which the tunnel closes.
  // host, port: where connections go on.
  // is_client: whether those are the ones with TLS, in place of those that are accepted.
  // Errors: as Tls; c10::DistNetworkError for an unknown host.
  Tunnel(int listener, const std::string& host, uint16_t port, std::string key, bool is_client);
  Tunnel(const Tunnel&) = delete;
  Tunnel& operator=(const Tunnel&) = delete;
  ~Tunnel();

  // Waits until the far end has proven that it has the key, on a connection of its own.
  // pauses: called between two attempts; it may throw.
  // Errors: c10::DistNetworkError if it has not within this time; the text says why.
  void prove(Time timeout, const std::function<void()>& pauses) const;
  // Ends all connections, once what their clients have written has gone on.
  void close();

 private:
  struct Connection;

  void run();
  // Whether nothing that clients have written waits here.
  [[nodiscard]] bool is_idle() const;
  void listen(bool accepts);
  void accept_one();
  void handle(uint64_t id, bool is_secret, uint32_t events);
  // Each returns whether the connection goes on.
  bool connect_next(Connection& connection) const;
  bool did_connect(Connection& connection) const;
  bool read_secret(Connection& connection) const;
  bool read_plain(Connection& connection) const;
  bool write(Connection& connection) const;
  // Waits for what the connection can do next.
  void watch(uint64_t id, Connection& connection) const;
  void drop(uint64_t id);
  void drop_unproven();

  const std::string where_;
  const std::vector<Address> to_;
  const Tls tls_;
  const bool is_client_;
  const int listener_;
  const int wake_;
  const int epoll_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;  // in the order of their ids
  uint64_t last_id_ = 0;
  std::thread thread_;
};

}  // namespace commhook::wire
