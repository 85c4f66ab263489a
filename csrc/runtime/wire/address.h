// Where processes listen.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace commhook::wire {

struct Address {
  uint64_t id = 0;  // of the process
  sockaddr_storage place{};
  socklen_t size = 0;

  // "identity host port", which parse() reads.
  [[nodiscard]] std::string text() const;
  static std::optional<Address> parse(const std::string& text);
};

// The addresses of a host and a port; empty if it is unknown. flags: AI_ of getaddrinfo().
std::vector<Address> resolve(const std::string& host, const std::string& port, int flags = 0);

// The addresses to listen at, the best first, with any port.
//
// host: an address, a name or an interface; "": the host's own name, and then loopback.
std::vector<Address> addresses_of(const std::string& host);

}  // namespace commhook::wire
