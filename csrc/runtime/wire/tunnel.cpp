#include "runtime/wire/tunnel.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace commhook::wire {
namespace {

constexpr uint64_t kWake = 0;
constexpr uint64_t kListener = 1;
constexpr Time kMillisecond = kSecond / 1000;
constexpr Time kTick = kSecond / 2;
// Programs end with words to a store for which they do not wait.
constexpr Time kLongestClosing = kSecond;
constexpr Time kClosingTick = kSecond / 200;
constexpr size_t kReadBytes = 64 * 1024;
constexpr size_t kMostWaiting = 256 * 1024;
constexpr size_t kMostUnproven = 1024;
constexpr Time kLongestUnproven = 10 * kSecond;
constexpr Time kPause = kSecond / 20;
// Somebody who has another key refuses each time.
constexpr int kMostRefusals = 3;
// A host that is gone for a minute has lost its connections.
constexpr int kIdleSeconds = 30;
constexpr int kProbeSeconds = 10;
constexpr int kProbes = 3;

Time now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void set(int fd, int level, int option, int value) {
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

void set_options(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

// A socket that connects; -1 if it cannot.
int connecting_to(const Address& address) {
  const int fd = socket(address.place.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd >= 0) {
    set_options(fd);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address.place), address.size) != 0 &&
        errno != EINPROGRESS) {
      const int error = errno;
      ::close(fd);
      errno = error;
      return -1;
    }
  }
  return fd;
}

// The error of a connection that has been made or not; 0 if it has.
int error_of(int fd) {
  int error = 0;
  socklen_t size = sizeof(error);
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

bool must_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

struct Tunnel::Connection {
  Connection(const Tls& tls, bool is_client, int fd)
      : session(tls.session(is_client)), since(now()) {
    (is_client ? plain : secret) = fd;
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    for (const int fd : {plain, secret}) {
      if (fd >= 0) {
        ::close(fd);
      }
    }
  }
  [[nodiscard]] bool is_whole() const { return session->is_agreed() && is_connected; }
  [[nodiscard]] size_t to_plain_size() const { return to_plain.size() - to_plain_sent; }

  const std::unique_ptr<TlsSession> session;
  const Time since;
  int plain = -1;
  int secret = -1;
  bool is_connected = false;  // where it goes on
  size_t next_address = 0;
  bool has_ended = false;  // one side; what has come from it still goes on
  std::vector<uint8_t> to_plain;
  size_t to_plain_sent = 0;
  std::array<uint32_t, 2> watched{};  // what epoll waits for: plain, secret
};

Tunnel::Tunnel(int listener, const std::string& host, uint16_t port, std::string key,
               bool is_client)
    : where_(host + ", port " + std::to_string(port)),
      to_(resolve(host, std::to_string(port))),
      tls_(std::move(key)),
      is_client_(is_client),
      listener_(listener),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  TORCH_CHECK_WITH(DistNetworkError, !to_.empty(), "no host has the name ", host);
  TORCH_CHECK_WITH(DistNetworkError, wake_ >= 0 && epoll_ >= 0, "no file is left for a tunnel");
  for (const auto& [fd, id] : {std::pair(wake_, kWake), std::pair(listener_, kListener)}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id << 1;
    (void)epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
  last_id_ = kListener;
  thread_ = std::thread([this] { run(); });
}

Tunnel::~Tunnel() { close(); }

void Tunnel::close() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    (void)!::write(wake_, &one, sizeof(one));
    thread_.join();
    connections_.clear();
    for (const int fd : {listener_, wake_, epoll_}) {
      ::close(fd);
    }
  }
}

// ---- the far end --------------------------------------------------------------------------------

void Tunnel::prove(Time timeout, const std::function<void()>& pauses) const {
  const Time until = now() + timeout;
  const auto rest = [&](Time longest) {
    return static_cast<int>(std::max<Time>(0, std::min(until - now(), longest)) / kMillisecond);
  };
  std::string reason;
  int refusals = 0;
  do {
    for (const Address& each : to_) {
      const int fd = connecting_to(each);
      int error = fd < 0 ? errno : 0;
      pollfd polled{fd, POLLOUT, 0};
      if (error == 0) {
        error = poll(&polled, 1, rest(kLongestUnproven)) > 0 ? error_of(fd) : ETIMEDOUT;
      }
      if (error != 0) {
        reason = std::strerror(error);
        ::close(fd);
        continue;
      }
      const auto session = tls_.session(true);
      reason = "the store there has another token, or none";
      std::vector<uint8_t> bytes(kReadBytes);
      bool goes_on = true;
      while (goes_on && !session->is_agreed()) {
        const ssize_t sent = send(fd, session->to_send(), session->to_send_size(), MSG_NOSIGNAL);
        session->sent(std::max<ssize_t>(0, sent));
        polled.events = POLLIN;
        goes_on = poll(&polled, 1, rest(kLongestUnproven)) > 0;
        const ssize_t count = goes_on ? recv(fd, bytes.data(), bytes.size(), 0) : 0;
        goes_on = count > 0 && session->take(bytes.data(), count);
      }
      ::close(fd);
      if (session->is_agreed()) {
        return;
      }
      ++refusals;
    }
    pauses();
    std::this_thread::sleep_for(std::chrono::nanoseconds(kPause));
  } while (now() < until && refusals < kMostRefusals);
  TORCH_CHECK_WITH(DistNetworkError, false, "no connection to ", where_, ": ", reason);
}

bool Tunnel::connect_next(Connection& connection) const {
  int& fd = is_client_ ? connection.secret : connection.plain;
  if (fd >= 0) {
    ::close(fd);  // which epoll then forgets
    connection.watched[is_client_ ? 1 : 0] = 0;
  }
  for (fd = -1; fd < 0 && connection.next_address < to_.size();) {
    fd = connecting_to(to_[connection.next_address++]);
  }
  return fd >= 0;
}

bool Tunnel::did_connect(Connection& connection) const {
  if (error_of(is_client_ ? connection.secret : connection.plain) != 0) {
    return connect_next(connection);
  }
  connection.is_connected = true;
  return true;
}

// ---- bytes --------------------------------------------------------------------------------------

bool Tunnel::read_secret(Connection& connection) const {
  std::array<uint8_t, kReadBytes> bytes;
  const ssize_t count = recv(connection.secret, bytes.data(), bytes.size(), 0);
  if (count < 0) {
    return must_wait();
  }
  connection.has_ended = count == 0;
  if (count > 0 && !connection.session->take(bytes.data(), count)) {
    return false;
  }
  while (connection.session->is_agreed()) {
    const int64_t found = connection.session->read(bytes.data(), bytes.size());
    if (found <= 0) {
      return found == 0;
    }
    connection.to_plain.insert(connection.to_plain.end(), bytes.begin(), bytes.begin() + found);
  }
  return true;
}

bool Tunnel::read_plain(Connection& connection) const {
  std::array<uint8_t, kReadBytes> bytes;
  const ssize_t count = recv(connection.plain, bytes.data(), bytes.size(), 0);
  if (count < 0) {
    return must_wait();
  }
  connection.has_ended = count == 0;
  if (count > 0) {
    connection.session->write(bytes.data(), count);
  }
  return true;
}

bool Tunnel::write(Connection& connection) const {
  TlsSession& session = *connection.session;
  const bool has_secret = !is_client_ || connection.is_connected;
  while (has_secret && session.to_send_size() > 0) {
    const ssize_t count =
        send(connection.secret, session.to_send(), session.to_send_size(), MSG_NOSIGNAL);
    if (count < 0) {
      if (!must_wait()) {
        return false;
      }
      break;
    }
    session.sent(count);
  }
  while (connection.is_whole() && connection.to_plain_size() > 0) {
    const ssize_t count =
        send(connection.plain, connection.to_plain.data() + connection.to_plain_sent,
             connection.to_plain_size(), MSG_NOSIGNAL);
    if (count < 0) {
      if (!must_wait()) {  // nobody reads it; what has come from there still goes on
        connection.has_ended = true;
        connection.to_plain_sent = connection.to_plain.size();
      }
      break;
    }
    connection.to_plain_sent += count;
  }
  if (2 * connection.to_plain_sent >= connection.to_plain.size()) {
    connection.to_plain.erase(
        connection.to_plain.begin(),
        connection.to_plain.begin() + static_cast<ptrdiff_t>(connection.to_plain_sent));
    connection.to_plain_sent = 0;
  }
  return true;
}

// ---- the thread ---------------------------------------------------------------------------------

void Tunnel::run() {
  c10::setThreadName("commhook_tunnel");
  std::array<epoll_event, 64> events;
  Time next_tick = now() + kTick;
  Time end = 0;  // set when it closes
  while (end == 0 || (now() < end && !is_idle())) {
    const Time longest = end == 0 ? kTick : kClosingTick;
    const int count = epoll_wait(epoll_, events.data(), events.size(), longest / kMillisecond);
    bool has_new = false;
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[i].data.u64 >> 1;
      if (id == kWake) {
        end = now() + kLongestClosing;
        (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, wake_, nullptr);
        continue;
      }
      try {
        if (id == kListener) {
          has_new = true;
          accept_one();
        } else {
          handle(id, (events[i].data.u64 & 1) != 0, events[i].events);
        }
      } catch (const std::exception&) {  // no memory is left
        drop(id);
      }
    }
    const bool is_tick = now() >= next_tick;
    if (has_new || is_tick) {
      drop_unproven();
    }
    if (is_tick) {
      next_tick = now() + kTick;
      listen(true);
    }
  }
}

bool Tunnel::is_idle() const {
  return std::all_of(connections_.begin(), connections_.end(), [](const auto& each) {
    const Connection& connection = *each.second;
    int waiting = 0;
    return !connection.is_whole() ||
           (connection.session->to_send_size() == 0 &&
            (ioctl(connection.plain, FIONREAD, &waiting) != 0 || waiting == 0));
  });
}

void Tunnel::listen(bool accepts) {
  epoll_event event{};
  event.events = accepts ? EPOLLIN : 0U;
  event.data.u64 = kListener << 1;
  (void)epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &event);
}

void Tunnel::accept_one() {
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (!must_wait() && errno != ECONNABORTED) {  // no file is left: not before the next tick
      listen(false);
    }
    return;
  }
  set_options(fd);
  const uint64_t id = ++last_id_;
  auto made = std::make_unique<Connection>(tls_, is_client_, fd);
  Connection& connection = *connections_.emplace(id, std::move(made)).first->second;
  if (is_client_ && !connect_next(connection)) {
    drop(id);
    return;
  }
  watch(id, connection);
}

void Tunnel::handle(uint64_t id, bool is_secret, uint32_t events) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) {
    return;  // dropped by an event before this one
  }
  Connection& connection = *found->second;
  bool goes_on = true;
  if (is_secret == is_client_ && !connection.is_connected) {
    goes_on = did_connect(connection);
  } else if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    goes_on = is_secret ? read_secret(connection) : read_plain(connection);
  }
  if (goes_on && !is_client_ && connection.session->is_agreed() && connection.plain < 0) {
    goes_on = connect_next(connection);
  }
  goes_on = goes_on && write(connection);
  const bool is_done = connection.has_ended && connection.session->to_send_size() == 0 &&
                       connection.to_plain_size() == 0;
  if (!goes_on || is_done) {
    drop(id);
  } else {
    watch(id, connection);
  }
}

void Tunnel::watch(uint64_t id, Connection& connection) const {
  const bool reads = !connection.has_ended;
  const size_t to_secret = connection.session->to_send_size();
  const size_t to_plain = connection.to_plain_size();
  const bool connects_secret = is_client_ && !connection.is_connected;
  const bool connects_plain = !is_client_ && !connection.is_connected;
  std::array<uint32_t, 2> wanted{};
  if (connection.plain >= 0) {
    wanted[0] |= reads && connection.is_whole() && to_secret < kMostWaiting ? EPOLLIN : 0U;
    wanted[0] |= connects_plain || (connection.is_whole() && to_plain > 0) ? EPOLLOUT : 0U;
  }
  if (connection.secret >= 0) {
    wanted[1] |= reads && !connects_secret && to_plain < kMostWaiting ? EPOLLIN : 0U;
    wanted[1] |= connects_secret || to_secret > 0 ? EPOLLOUT : 0U;
  }
  for (const uint64_t side : {0, 1}) {
    const int fd = side == 0 ? connection.plain : connection.secret;
    if (wanted[side] == connection.watched[side]) {
      continue;
    }
    epoll_event event{};
    event.events = wanted[side];
    event.data.u64 = id << 1 | side;
    // Without any event in it, epoll would still tell of the other side's end, again and again.
    const int change = wanted[side] == 0               ? EPOLL_CTL_DEL
                       : connection.watched[side] == 0 ? EPOLL_CTL_ADD
                                                       : EPOLL_CTL_MOD;
    (void)epoll_ctl(epoll_, change, fd, &event);
    connection.watched[side] = wanted[side];
  }
}

void Tunnel::drop(uint64_t id) { connections_.erase(id); }

void Tunnel::drop_unproven() {
  std::vector<uint64_t> unproven;
  for (const auto& [id, connection] : connections_) {
    if (!connection->is_whole()) {
      unproven.push_back(id);
    }
  }
  const Time latest = now() - kLongestUnproven;
  for (size_t i = 0; i < unproven.size(); ++i) {
    if (unproven.size() - i > kMostUnproven || connections_[unproven[i]]->since < latest) {
      drop(unproven[i]);
    }
  }
}

}  // namespace commhook::wire
