#include "runtime/wire/endpoint.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <set>
#include <sstream>

#include "runtime/wire/state.h"

namespace commhook::wire {
namespace {

constexpr uint64_t kListener = 0;
constexpr uint64_t kWake = 1;
constexpr Time kTick = kSecond / 20;
constexpr Time kIdleTick = kSecond / 2;
constexpr Time kStopTick = kSecond / 200;
constexpr Time kFirstPause = kSecond / 50;
constexpr Time kLongestPause = kSecond;
constexpr Time kLongestConnecting = 5 * kSecond;
// The part of lost_after that is left to connect again after a connection has broken.
constexpr Time kShareToConnect = 3;
// Connections whose process is not known yet.
constexpr Time kLongestUnknown = 60 * kSecond;
constexpr size_t kMostUnknown = 1024;
constexpr size_t kMostRails = 64;
constexpr size_t kMostWorkers = 32;
constexpr Time kLongestLost = 24 * 3600 * kSecond;
constexpr Time kLongestStop = 5 * kSecond;
// What is handed to a socket at once, and how often in a row for one peer.
constexpr size_t kWriteBytes = 1024 * 1024;
constexpr int kTurns = 4;
constexpr size_t kMostSpans = 64;
// What is behind a payload is read with it, so that small frames take one call.
constexpr size_t kStagingBytes = 4096;
constexpr size_t kTlsBytes = 64 * 1024;
// The kernel keeps this much that it has not sent, so that frames that must not wait pass the rest.
constexpr int kUnsentBytes = 512 * 1024;

void set(int fd, int level, int option, int value) {
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

void set_options(int fd, Time lost_after) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsentBytes);
  // A process that is stopped takes nothing either. Its host accepts the next connection.
  const Time longest = lost_after - lost_after / kShareToConnect;
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(longest / (kSecond / 1000)));
}

// ---- children of fork() -------------------------------------------------------------------------

struct Forks {
  std::mutex mutex;
  std::set<State*> states;
};

Forks& forks() {
  static auto* const kForks = new Forks;  // other threads may outlive it
  return *kForks;
}

void lock_all() {
  forks().mutex.lock();
  for (State* each : forks().states) {
    each->mutex.lock();
  }
}

void unlock_all() {
  for (State* each : forks().states) {
    each->mutex.unlock();
  }
  forks().mutex.unlock();
}

void close_all() {
  for (State* each : forks().states) {
    each->close_in_child();
  }
  unlock_all();
}

uint64_t random_id() {
  std::random_device device;
  const uint64_t high = device();
  return std::max<uint64_t>(1, high << 32 | device());
}

// The payload of a greeting.
std::string greeting_text(const std::string& version, uint64_t from, uint64_t to, size_t rail) {
  std::ostringstream text;
  text << std::hex << from << ' ' << to << ' ' << rail << ' ' << version;
  return text.str();
}

struct Greeting {
  uint64_t from = 0;
  uint64_t to = 0;
  size_t rail = 0;
  std::string version;
};

std::optional<Greeting> parse_greeting(const std::string& text) {
  std::istringstream words(text);
  Greeting found;
  words >> std::hex >> found.from >> found.to >> found.rail;
  words.get();
  std::getline(words, found.version);
  return words.fail() ? std::nullopt : std::optional(found);
}

}  // namespace

// ---- threads ------------------------------------------------------------------------------------

static thread_local bool is_worker = false;

bool Workers::is_one() { return is_worker; }

void Workers::run(std::function<void()> function, bool has_waits) {
  std::unique_lock lock(shared_->mutex);
  if (has_waits) {
    ++shared_->waiting;
    function = [shared = shared_, inner = std::move(function)] {
      inner();
      const std::lock_guard lock(shared->mutex);
      --shared->waiting;
    };
  }
  shared_->functions.push_back(std::move(function));
  ++shared_->open;
  if (shared_->functions.size() <= shared_->idle) {
    shared_->changed.notify_all();
    return;
  }
  if (shared_->threads >= kMostWorkers + shared_->waiting) {
    return;
  }
  ++shared_->threads;
  try {
    std::thread([shared = shared_] { serve(shared, true); }).detach();
  } catch (const std::system_error&) {  // the process may have no more threads
    if (--shared_->threads == 0) {
      lock.unlock();
      serve(shared_, false);
    }
  }
}

// stays: until nothing has come for five seconds.
void Workers::serve(const std::shared_ptr<Shared>& shared, bool stays) {
  std::unique_lock lock(shared->mutex);
  const bool was_one = std::exchange(is_worker, true);
  for (;;) {
    while (!shared->functions.empty()) {
      auto next = std::move(shared->functions.front());
      shared->functions.pop_front();
      lock.unlock();
      next();
      next = nullptr;  // what it owns may take time, too
      lock.lock();
      if (--shared->open == 0) {
        shared->changed.notify_all();
      }
    }
    if (!stays) {
      break;
    }
    ++shared->idle;
    shared->changed.wait_for(lock, std::chrono::seconds(5),
                             [&] { return !shared->functions.empty(); });
    --shared->idle;
    if (shared->functions.empty()) {
      --shared->threads;
      break;
    }
  }
  is_worker = was_one;
}

void Workers::finish(std::chrono::seconds longest) {
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait_for(lock, longest, [this] { return shared_->open == 0; });
}

// ---- the endpoint -------------------------------------------------------------------------------

Endpoint::Endpoint(Options options) : state_(std::make_shared<State>(std::move(options))) {
  static const bool kIsRegistered = pthread_atfork(lock_all, unlock_all, close_all) == 0;
  TORCH_CHECK_WITH(DistNetworkError, kIsRegistered, "pthread_atfork has failed");
  {
    const std::lock_guard lock(forks().mutex);
    forks().states.insert(state_.get());
  }
  state_->thread = std::thread([state = state_] { state->loop(); });
}

void Endpoint::stop() {
  const std::lock_guard lock(state_->mutex);
  if (state_->stop_at == 0) {
    state_->stop_at = State::now() + kLongestStop;
    const uint64_t one = 1;
    (void)!::write(state_->wake, &one, sizeof(one));
  }
}

Endpoint::~Endpoint() {
  stop();
  bool is_forked = false;
  {
    const std::lock_guard lock(state_->mutex);
    is_forked = state_->is_forked;
  }
  if (is_forked || state_->thread.get_id() == std::this_thread::get_id()) {
    state_->thread.detach();
  } else {
    state_->thread.join();
    state_->workers.finish(std::chrono::seconds(kLongestStop / kSecond));
  }
  const std::lock_guard lock(forks().mutex);
  forks().states.erase(state_.get());
}

std::string Endpoint::address() const { return state_->address; }

Endpoint::Counts Endpoint::counts() const {
  const std::lock_guard lock(state_->mutex);
  return state_->counts;
}

bool Endpoint::has_lost() const {
  const std::lock_guard lock(state_->mutex);
  return std::any_of(state_->peers.begin(), state_->peers.end(), [](const auto& each) {
    const auto end = each.second.link->ended();
    return end != Rail::End::kNone && end != Rail::End::kStopped;
  });
}

bool Endpoint::has_groups() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->groups.empty();
}

void Endpoint::cut() {
  const std::lock_guard lock(state_->mutex);
  for (auto& [number, connection] : state_->connections) {
    (void)shutdown(connection.fd, SHUT_RDWR);
  }
}

Time State::now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

State::State(Endpoint::Options given)
    : options(std::move(given)),
      tls(options.key.empty() ? nullptr : std::make_unique<Tls>(options.key)),
      id(random_id()) {
  TORCH_CHECK_VALUE(options.rails >= 1 && options.rails <= kMostRails, "rails must be 1 to ",
                    kMostRails, ", got ", options.rails);
  TORCH_CHECK_VALUE(options.lost_after >= kSecond && options.lost_after <= kLongestLost,
                    "lost_after must be 1 to ", kLongestLost / kSecond, " seconds");
  int error = EADDRNOTAVAIL;
  for (const Address& each : addresses_of(options.host)) {
    listener = socket(each.place.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    Address own;
    own.id = id;
    own.size = sizeof(own.place);
    if (listener >= 0 &&
        bind(listener, reinterpret_cast<const sockaddr*>(&each.place), each.size) == 0 &&
        listen(listener, SOMAXCONN) == 0 &&
        getsockname(listener, reinterpret_cast<sockaddr*>(&own.place), &own.size) == 0) {
      address = own.text();
      break;
    }
    error = errno;
    ::close(listener);
    listener = -1;
  }
  TORCH_CHECK_WITH(DistNetworkError, listener >= 0, "cannot listen at '", options.host,
                   "': ", std::strerror(error));
  poll = epoll_create1(EPOLL_CLOEXEC);
  wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  for (const auto& [fd, number] : {std::pair(listener, kListener), std::pair(wake, kWake)}) {
    TORCH_CHECK_WITH(DistNetworkError, watch(EPOLL_CTL_ADD, fd, number, EPOLLIN),
                     "epoll_ctl: ", std::strerror(errno));
  }
}

State::~State() {
  for (const int fd : {listener, poll, wake}) {
    if (fd >= 0) {
      ::close(fd);
    }
  }
}

void State::close_in_child() {
  if (std::exchange(is_forked, true)) {
    return;
  }
  for (auto& [number, connection] : connections) {
    ::close(connection.fd);
  }
  for (auto& [identity, peer] : peers) {
    std::fill(peer.connections.begin(), peer.connections.end(), nullptr);
  }
  connections.clear();
  workers.forget();
  for (int* fd : {&listener, &poll, &wake}) {
    ::close(*fd);
    *fd = -1;
  }
}

void State::loop() {
  std::vector<epoll_event> events(64);
  Time until_tick = kTick;
  for (;;) {
    const int wait = static_cast<int>(until_tick / (kSecond / 1000));
    const int count = epoll_wait(poll, events.data(), static_cast<int>(events.size()), wait);
    Calls calls;
    {
      const std::lock_guard lock(mutex);
      const Time time = now();
      for (int i = 0; i < count; ++i) {
        handle(events[i].data.u64, events[i].events, time);
      }
      if (time >= next_tick || stop_at != 0) {
        tick(time);
        find_late(time, calls);
        const bool is_idle = pending.empty() && is_acknowledged() && !owes_acknowledgement();
        next_tick = time + (stop_at != 0 ? kStopTick : is_idle ? kIdleTick : kTick);
      }
      until_tick = std::max<Time>(0, next_tick - time);
      settle(calls);
      if (stop_at != 0 && (time >= stop_at || is_acknowledged())) {
        break;
      }
    }
    make(calls);
  }
  Calls calls;
  {
    const std::lock_guard lock(mutex);
    while (!connections.empty()) {
      close(connections.begin()->second, now());
    }
    // Now others learn that nobody answers. Groups may keep the rest of this.
    ::close(std::exchange(listener, -1));
    for (auto& [digest, group] : std::exchange(groups, {})) {
      fail(*group, {Failure::Kind::kClosed, group->rank, "this process has left"}, calls);
    }
  }
  make(calls);
}

bool State::is_acknowledged() const {
  return std::all_of(peers.begin(), peers.end(), [](const auto& each) {
    const Peer& peer = each.second;
    return peer.link->ended() != Rail::End::kNone || !peer.is_needed ||
           peer.link->is_acknowledged();
  });
}

bool State::owes_acknowledgement() const {
  return std::any_of(connections.begin(), connections.end(), [this](const auto& each) {
    const Connection& connection = each.second;
    return connection.peer != 0 && !connection.is_connecting &&
           peers.at(connection.peer).link->rail(connection.rail).owes_acknowledgement();
  });
}

void State::tick(Time time) {
  if (is_deaf) {
    listen_from_now(true);
  }
  for (auto& [id, peer] : peers) {
    if (peer.link->ended() == Rail::End::kNone) {
      if (peer.is_needed) {
        need(peer, time);
        peer.link->tick(time, options.lost_after);
      }
      flush(peer, time);
    }
  }
  std::vector<uint64_t> old;
  for (auto& [number, connection] : connections) {
    const Time age = time - connection.since;
    if ((connection.is_connecting && age > kLongestConnecting) ||
        (connection.peer == 0 && age > kLongestUnknown)) {
      old.push_back(number);
    }
  }
  for (const uint64_t number : old) {
    close(connections.at(number), time);
  }
}

void State::touch(Peer& peer) {
  if (!std::exchange(peer.has_news, true)) {
    news.push_back(&peer);
  }
}

// ---- peers --------------------------------------------------------------------------------------

Peer& State::peer(const Address& other) {
  const auto [found, is_new] = peers.try_emplace(other.id);
  Peer& peer = found->second;
  if (is_new) {
    peer.address = other;
    peer.connections.resize(options.rails);
    const uint64_t from = other.id;
    peer.link = std::make_unique<Link>(
        options.rails,
        [this, from](size_t rail) { return greeting_text(options.version, id, from, rail); },
        [this, from](const std::string& text, size_t rail) -> std::string {
          const auto greeting = parse_greeting(text);
          if (!greeting || greeting->from != from || greeting->to != id || greeting->rail != rail) {
            return "another process listens there";
          }
          return greeting->version == options.version ? ""
                                                      : "it runs version " + greeting->version +
                                                            ", and this process " + options.version;
        });
    // A process may have connected before this one knew of it.
    std::vector<uint64_t> unknown;
    for (const auto& [number, connection] : connections) {
      if (connection.peer == 0 && !connection.head.empty()) {
        unknown.push_back(number);
      }
    }
    for (const uint64_t number : unknown) {
      const auto waiting = connections.find(number);
      if (waiting != connections.end() && !take_head(waiting->second, now())) {
        close(waiting->second, now());
      }
    }
  }
  return peer;
}

void State::need(Peer& peer, Time time) {
  if (!std::exchange(peer.is_needed, true)) {
    for (size_t i = 0; i < options.rails; ++i) {
      peer.link->rail(i).saw(time);
    }
  }
  if (peer.link->ended() == Rail::End::kNone && time >= peer.next_try) {
    for (size_t i = 0; i < options.rails; ++i) {
      if (peer.connections[i] == nullptr) {
        connect(peer, i, time);
      }
    }
  }
}

void State::flush(Peer& peer, Time time) {
  for (Connection* each : peer.connections) {
    if (each != nullptr && !each->is_connecting && !each->wants_write) {
      write(*each, time);
    }
  }
  touch(peer);
}

// ---- connections --------------------------------------------------------------------------------

void State::connect(Peer& peer, size_t rail, Time time) {
  peer.pause = std::clamp(2 * peer.pause, kFirstPause, kLongestPause);
  peer.next_try = time + peer.pause;
  const int fd =
      socket(peer.address.place.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return;
  }
  set_options(fd, options.lost_after);
  Connection& connection = connections[++last_number];
  connection.fd = fd;
  connection.number = last_number;
  connection.peer = peer.address.id;
  connection.rail = rail;
  connection.is_own = true;
  connection.is_connecting = true;
  connection.since = time;
  peer.connections[rail] = &connection;
  const auto* place = reinterpret_cast<const sockaddr*>(&peer.address.place);
  if (::connect(fd, place, peer.address.size) != 0 && errno != EINPROGRESS) {
    not_connected(connection, errno, time);
    return;
  }
  (void)watch(EPOLL_CTL_ADD, fd, connection.number, EPOLLOUT);
}

void State::not_connected(Connection& connection, int error, Time time) {
  Peer& peer = peers.at(connection.peer);
  close(connection, time);
  if (error == ECONNREFUSED) {
    peer.link->end(Rail::End::kStopped, "");  // its process listened before it gave its address
    touch(peer);
  }
}

void State::connected(Connection& connection, Time time) {
  Peer& peer = peers.at(connection.peer);
  connection.is_connecting = false;
  connection.tls = tls ? tls->session(true) : nullptr;
  ++counts.connections;
  watch(connection, false);
  peer.link->rail(connection.rail).connected(time);
  write(connection, time);
}

void State::listen_from_now(bool listens) {
  is_deaf = !listens;
  (void)watch(EPOLL_CTL_MOD, listener, kListener, listens ? EPOLLIN : 0);
}

void State::accept_all(Time time) {
  for (;;) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        listen_from_now(false);  // until the next tick: the thread would be woken at once
      }
      return;
    }
    const auto unknown = std::count_if(connections.begin(), connections.end(),
                                       [](const auto& each) { return each.second.peer == 0; });
    if (static_cast<size_t>(unknown) >= kMostUnknown) {
      ::close(fd);
      continue;
    }
    set_options(fd, options.lost_after);
    Connection& connection = connections[++last_number];
    connection.fd = fd;
    connection.number = last_number;
    connection.since = time;
    connection.tls = tls ? tls->session(false) : nullptr;
    (void)watch(EPOLL_CTL_ADD, fd, connection.number, EPOLLIN);
  }
}

bool State::watch(int operation, int fd, uint64_t number, uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  return epoll_ctl(poll, operation, fd, &event) == 0;
}

void State::watch(Connection& connection, bool for_writing) {
  connection.wants_write = for_writing;
  (void)watch(EPOLL_CTL_MOD, connection.fd, connection.number,
              for_writing ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void State::close(Connection& connection, Time time) {
  if (connection.peer != 0) {
    Peer& peer = peers.at(connection.peer);
    peer.connections[connection.rail] = nullptr;
    Rail& rail = peer.link->rail(connection.rail);
    if (rail.state() == Rail::State::kOpen) {
      peer.pause = 0;
      peer.next_try = time;
    }
    if (!connection.is_connecting) {
      ++counts.broken;
      rail.broken();
      const Time rest = options.lost_after / kShareToConnect;
      rail.saw(std::max(rail.last_sign(), time - options.lost_after + rest));
    }
    touch(peer);
  }
  ::close(connection.fd);
  connections.erase(connection.number);
}

void State::handle(uint64_t number, uint32_t events, Time time) {
  if (number == kListener) {
    accept_all(time);
    return;
  }
  if (number == kWake) {
    uint64_t count = 0;
    (void)!::read(wake, &count, sizeof(count));
    return;
  }
  const auto find = [&] { return connections.find(number); };
  const auto found = find();
  if (found == connections.end()) {
    return;  // closed meanwhile
  }
  Connection& connection = found->second;
  if (connection.is_connecting) {
    int error = 0;
    socklen_t size = sizeof(error);
    (void)getsockopt(connection.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0 || (events & EPOLLOUT) == 0) {
      not_connected(connection, error, time);
    } else {
      connected(connection, time);
    }
    return;
  }
  if (connection.peer == 0) {
    read_head(connection, time);
    return;
  }
  const uint64_t peer = connection.peer;
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    read(connection, time);
  }
  if ((events & EPOLLOUT) != 0 && find() != connections.end()) {
    write(connection, time);
  }
  flush(peers.at(peer), time);
}

// ---- reading and writing ------------------------------------------------------------------------

ssize_t State::receive(Connection& connection, const iovec* spans, size_t count, bool may_read) {
  if (connection.tls == nullptr) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(spans);
    message.msg_iovlen = count;
    return recvmsg(connection.fd, &message, 0);
  }
  for (;;) {
    ssize_t all = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto found =
          connection.tls->read(static_cast<uint8_t*>(spans[i].iov_base), spans[i].iov_len);
      if (found < 0) {
        errno = EPROTO;
        return -1;
      }
      all += found;
      if (static_cast<size_t>(found) < spans[i].iov_len) {
        break;
      }
    }
    if (all > 0) {
      return all;
    }
    if (!may_read) {
      errno = EAGAIN;
      return -1;
    }
    uint8_t bytes[kTlsBytes];
    const ssize_t came = recv(connection.fd, bytes, sizeof(bytes), 0);
    if (came <= 0) {
      return came;
    }
    if (!connection.tls->take(bytes, static_cast<size_t>(came))) {
      errno = EPROTO;
      return -1;
    }
    if (!send_tls(connection)) {
      return -1;
    }
  }
}

ssize_t State::transmit(Connection& connection, const iovec* spans, size_t count) {
  if (connection.tls == nullptr) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(spans);
    message.msg_iovlen = count;
    return sendmsg(connection.fd, &message, MSG_NOSIGNAL);
  }
  if (!send_tls(connection)) {
    return -1;
  }
  if (!connection.tls->is_agreed() || connection.tls->to_send_size() > 0) {
    errno = EAGAIN;
    return -1;
  }
  ssize_t all = 0;
  for (size_t i = 0; i < count; ++i) {
    connection.tls->write(static_cast<const uint8_t*>(spans[i].iov_base), spans[i].iov_len);
    all += static_cast<ssize_t>(spans[i].iov_len);
  }
  // An error comes again with the next call. Some of these bytes may have been sent before it, and
  // the other side may acknowledge them.
  (void)send_tls(connection);
  return all;
}

// Sends what TLS has for the socket, as much as that takes.
bool State::send_tls(Connection& connection) const {
  TlsSession& session = *connection.tls;
  while (session.to_send_size() > 0) {
    const ssize_t count =
        send(connection.fd, session.to_send(), session.to_send_size(), MSG_NOSIGNAL);
    if (count < 0) {
      return errno == EAGAIN || errno == EINTR;
    }
    session.sent(static_cast<size_t>(count));
  }
  return true;
}

// Says why a connection whose process is not known is closed. Nothing that has come is unread, so
// this arrives.
void State::refuse(Connection& connection, const char* text) {
  const Frame frame = text_frame(Kind::kRefusal, text);
  std::vector<uint8_t> bytes(kHeaderBytes);
  Header refusal = frame.header;
  refusal.length = static_cast<uint32_t>(frame.payload.size);
  refusal.checksum = crc32c(frame.payload.data, frame.payload.size);
  write_header(refusal, bytes.data());
  bytes.insert(bytes.end(), frame.payload.data, frame.payload.data + frame.payload.size);
  if (connection.tls != nullptr && connection.tls->is_agreed()) {
    const iovec span{bytes.data(), bytes.size()};
    (void)transmit(connection, &span, 1);
  } else {
    (void)send(connection.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
}

void State::read_head(Connection& connection, Time time) {
  uint8_t bytes[kHeaderBytes + kLongestText];
  const size_t most = sizeof(bytes) - std::min(sizeof(bytes), connection.head.size());
  const iovec span{bytes, most};
  const ssize_t count = receive(connection, &span, 1, true);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  if (count <= 0) {
    if (count < 0 && errno == EPROTO) {
      refuse(connection, kTokenText);
    }
    close(connection, time);
    return;
  }
  connection.head.insert(connection.head.end(), bytes, bytes + count);
  if (!take_head(connection, time)) {
    close(connection, time);
  }
}

// Returns whether the connection may stay. Then it may have been replaced by another, and be gone.
bool State::take_head(Connection& connection, Time time) {
  if (connection.head.size() < kHeaderBytes) {
    return true;
  }
  const auto header = read_header(connection.head.data());
  if (!header || header->kind != Kind::kGreeting || header->length > kLongestText) {
    if (!header) {
      refuse(connection, kTokenText);  // it may speak TLS
    }
    return false;
  }
  if (connection.head.size() < kHeaderBytes + header->length) {
    return true;
  }
  const auto* text = reinterpret_cast<const char*>(connection.head.data() + kHeaderBytes);
  const auto greeting = parse_greeting(std::string(text, header->length));
  if (!greeting || greeting->to != id || greeting->rail >= options.rails) {
    return false;
  }
  const auto found = peers.find(greeting->from);
  if (found == peers.end()) {
    (void)watch(EPOLL_CTL_MOD, connection.fd, connection.number, 0);  // until a channel names it
    return true;
  }
  Peer& peer = found->second;
  if (peer.link->ended() != Rail::End::kNone) {
    // It would connect again and again.
    refuse(connection, kLostText);
    return false;
  }
  Connection* const before = peer.connections[greeting->rail];
  if (before != nullptr) {
    if (before->is_own && id < peer.address.id) {
      return false;
    }
    close(*before, time);
  }
  ++counts.connections;
  connection.peer = greeting->from;
  connection.rail = greeting->rail;
  peer.connections[greeting->rail] = &connection;
  peer.link->rail(greeting->rail).connected(time);
  watch(connection, false);
  const std::vector<uint8_t> head = std::exchange(connection.head, {});
  const uint64_t number = connection.number;
  if (feed(connection, head.data(), head.size(), time)) {
    flush(peer, time);
    const auto still = connections.find(number);
    if (tls != nullptr && still != connections.end()) {
      read(still->second, time);
    }
  }
  return true;
}

// Returns whether the connection is still there.
bool State::feed(Connection& connection, const uint8_t* data, size_t size, Time time) {
  Rail& rail = peers.at(connection.peer).link->rail(connection.rail);
  while (size > 0) {
    const Space space = rail.to_read();
    const size_t count = std::min(space.size, size);
    if (count == 0) {
      return true;  // a refusal is being written
    }
    std::memcpy(space.data, data, count);
    if (!rail.did_read(count, time)) {
      close(connection, time);
      return false;
    }
    data += count;
    size -= count;
  }
  return true;
}

void State::read(Connection& connection, Time time) {
  Rail& rail = peers.at(connection.peer).link->rail(connection.rail);
  // What TLS has read is read to its end: the socket says nothing of it again.
  for (int turn = 0; turn < 2 * kTurns || connection.tls != nullptr; ++turn) {
    uint8_t staging[kStagingBytes];
    const Space space = rail.to_read();
    const iovec spans[2] = {{space.data, space.size}, {staging, sizeof(staging)}};
    const ssize_t count = receive(connection, spans, 2, turn < 2 * kTurns);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    }
    if (count <= 0) {
      if (count < 0 && errno == EPROTO && !connection.tls->is_agreed()) {
        peers.at(connection.peer).link->end(Rail::End::kRefused, kTokenText);
      }
      close(connection, time);
      return;
    }
    counts.received_bytes += static_cast<uint64_t>(count);
    const size_t direct = std::min(space.size, static_cast<size_t>(count));
    if (direct > 0 && !rail.did_read(direct, time)) {
      close(connection, time);
      return;
    }
    if (!feed(connection, staging, static_cast<size_t>(count) - direct, time) ||
        (connection.tls == nullptr && static_cast<size_t>(count) < space.size + sizeof(staging))) {
      return;
    }
  }
}

void State::write(Connection& connection, Time time) {
  Rail& rail = peers.at(connection.peer).link->rail(connection.rail);
  std::vector<Bytes> found;
  bool has_more = true;
  const bool is_alone = options.rails == 1;  // or one takes chunks for which others are free
  for (int turn = 0; turn < (is_alone ? kTurns : 1) && has_more; ++turn) {
    rail.to_write(found, is_alone ? kWriteBytes : kChunk, time);
    if (found.empty()) {
      has_more = false;
      break;
    }
    std::array<iovec, kMostSpans> spans{};
    const size_t most = std::min(found.size(), spans.size());
    size_t all = 0;
    for (size_t i = 0; i < most; ++i) {
      spans[i] = {const_cast<uint8_t*>(found[i].data), found[i].size};
      all += found[i].size;
    }
    const ssize_t count = transmit(connection, spans.data(), most);
    if (count < 0 && errno != EAGAIN && errno != EINTR) {
      close(connection, time);
      return;
    }
    if (count > 0) {
      counts.sent_bytes += static_cast<uint64_t>(count);
      rail.did_write(static_cast<size_t>(count), time);
    }
    if (count < static_cast<ssize_t>(all)) {
      break;
    }
  }
  if (connection.tls != nullptr) {
    // The socket is writable while the other side has not answered.
    has_more = connection.tls->to_send_size() > 0 || (connection.tls->is_agreed() && has_more);
  }
  if (has_more != connection.wants_write) {
    watch(connection, has_more);
  }
}

}  // namespace commhook::wire
