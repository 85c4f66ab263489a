#include "runtime/process_group/gloo_loops.h"

#ifdef __linux__
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#endif

namespace commhook {

#ifdef __linux__
namespace {

constexpr const char* kFiles = "/proc/self/fd";

// A file in an epoll set.
struct Watched {
  int fd;
  uint32_t events;
  uint64_t data;
};

std::vector<Watched> watched_by(int epoll) {
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(epoll));
  std::vector<Watched> found;
  for (std::string line; std::getline(file, line);) {
    int fd = 0;
    unsigned int events = 0;
    unsigned long long data = 0;
    if (std::sscanf(line.c_str(), " tfd: %d events: %x data: %llx", &fd, &events, &data) == 3) {
      found.push_back({fd, events, data});
    }
  }
  return found;
}

std::vector<int> epolls() {
  std::vector<int> found;
  DIR* const folder = opendir(kFiles);
  if (folder == nullptr) {
    return found;
  }
  while (const dirent* const entry = readdir(folder)) {
    std::array<char, 32> target{};
    const std::string path = std::string(kFiles) + "/" + entry->d_name;
    const auto length = readlink(path.c_str(), target.data(), target.size());
    if (length > 0 && std::string(target.data(), length) == "anon_inode:[eventpoll]") {
      found.push_back(std::atoi(entry->d_name));
    }
  }
  closedir(folder);
  return found;
}

bool is_tcp(int fd) {
  int type = 0;
  int domain = 0;
  socklen_t length = sizeof(int);
  return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_STREAM &&
         getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 &&
         (domain == AF_INET || domain == AF_INET6);
}

bool listens(int fd) {
  int listening = 0;
  socklen_t length = sizeof(listening);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) == 0 && listening != 0;
}

// Whether a socket listens on an address that one of the texts contains in the system's format.
bool listens_on(int fd, const std::vector<std::vector<uint8_t>>& texts) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (!is_tcp(fd) || !listens(fd) ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return false;
  }
  // Compares only the address, without the bytes after it.
  const size_t used = address.ss_family == AF_INET
                          ? offsetof(sockaddr_in, sin_addr) + sizeof(in_addr)
                          : offsetof(sockaddr_in6, sin6_addr) + sizeof(in6_addr);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&address);
  return std::any_of(texts.begin(), texts.end(), [&](const std::vector<uint8_t>& text) {
    return std::search(text.begin(), text.end(), bytes, bytes + used) != text.end();
  });
}

// The listening socket of a loop that has one of the addresses; -1 if there is none.
int listener_of(int epoll, const std::vector<std::vector<uint8_t>>& addresses) {
  for (const auto& each : watched_by(epoll)) {
    if (listens_on(each.fd, addresses)) {
      return each.fd;
    }
  }
  return -1;
}

}  // namespace

GlooLoops::GlooLoops(const std::vector<std::vector<uint8_t>>& addresses) {
  if (addresses.empty()) {
    return;
  }
  for (const int epoll : epolls()) {
    if (listener_of(epoll, addresses) < 0) {
      continue;
    }
    const int own = fcntl(epoll, F_DUPFD_CLOEXEC, 0);
    // The number may belong to another file by now.
    const int listener = own < 0 ? -1 : listener_of(own, addresses);
    if (listener >= 0) {
      loops_.push_back({own, listener});
    } else if (own >= 0) {
      close(own);
    }
  }
}

GlooLoops::~GlooLoops() {
  for (const auto& each : loops_) {
    close(each.epoll);
  }
}

std::vector<GlooSocket> GlooLoops::sockets() const {
  std::vector<GlooSocket> found;
  for (const auto& loop : loops_) {
    for (const auto& each : watched_by(loop.epoll)) {
      struct stat status{};
      if (is_tcp(each.fd) && !listens(each.fd) && fstat(each.fd, &status) == 0) {
        found.push_back({each.fd, static_cast<uint64_t>(status.st_ino)});
      }
    }
  }
  return found;
}

bool GlooLoops::quieten(bool drops_output) const {
  bool is_there = false;
  for (const auto& loop : loops_) {
    for (const auto& each : watched_by(loop.epoll)) {
      if ((each.events & EPOLLONESHOT) != 0) {
        continue;  // becomes ready at most once, and must not become ready again
      }
      epoll_event event{};
      event.events = each.events | EPOLLET;
      if (drops_output) {
        event.events &= ~static_cast<uint32_t>(EPOLLOUT);
      }
      event.data.u64 = each.data;
      // Fails for a file that is closed by now.
      const bool is_open = epoll_ctl(loop.epoll, EPOLL_CTL_MOD, each.fd, &event) == 0;
      is_there = is_there || (is_open && each.fd == loop.listener);
    }
  }
  return is_there;
}

#else

GlooLoops::GlooLoops(const std::vector<std::vector<uint8_t>>& /*addresses*/) {}

GlooLoops::~GlooLoops() = default;

std::vector<GlooSocket> GlooLoops::sockets() const { return {}; }

bool GlooLoops::quieten(bool /*drops_output*/) const { return false; }

#endif

}  // namespace commhook
