#include "runtime/wire/address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cstring>
#include <sstream>

namespace commhook::wire {
namespace {

std::vector<Address> of_interface(const std::string& name) {
  std::vector<Address> places;
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) {
    return places;
  }
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    const int family = each->ifa_addr == nullptr ? AF_UNSPEC : each->ifa_addr->sa_family;
    if (name == each->ifa_name && (family == AF_INET || family == AF_INET6)) {
      Address& place = places.emplace_back();
      place.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&place.place, each->ifa_addr, place.size);
    }
  }
  freeifaddrs(found);
  return places;
}

}  // namespace

std::vector<Address> resolve(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  std::vector<Address> places;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) {
    return places;
  }
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    Address& place = places.emplace_back();
    std::memcpy(&place.place, each->ai_addr, each->ai_addrlen);
    place.size = each->ai_addrlen;
  }
  freeaddrinfo(found);
  return places;
}

std::string Address::text() const {
  char host[NI_MAXHOST] = "";
  char port[NI_MAXSERV] = "";
  (void)getnameinfo(reinterpret_cast<const sockaddr*>(&place), size, host, sizeof(host), port,
                    sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
  std::ostringstream found;
  found << std::hex << id << ' ' << host << ' ' << port;
  return found.str();
}

std::optional<Address> Address::parse(const std::string& text) {
  std::istringstream words(text);
  uint64_t id = 0;
  std::string host;
  std::string port;
  words >> std::hex >> id >> host >> port;
  auto places = words.fail() || id == 0 ? std::vector<Address>()
                                        : resolve(host, port, AI_NUMERICHOST | AI_NUMERICSERV);
  if (places.empty()) {
    return std::nullopt;
  }
  places[0].id = id;
  return places[0];
}

std::vector<Address> addresses_of(const std::string& host) {
  if (!host.empty()) {
    std::vector<Address> found = of_interface(host);
    return found.empty() ? resolve(host, "0", AI_PASSIVE) : found;
  }
  char name[256] = "";
  (void)gethostname(name, sizeof(name) - 1);
  std::vector<Address> found = resolve(name, "0", AI_PASSIVE);
  for (const char* loopback : {"127.0.0.1", "::1"}) {
    for (const Address& each : resolve(loopback, "0", AI_PASSIVE | AI_NUMERICHOST)) {
      found.push_back(each);
    }
  }
  return found;
}

}  // namespace commhook::wire
