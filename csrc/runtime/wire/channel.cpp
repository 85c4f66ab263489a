#include "runtime/wire/channel.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <utility>

#include "runtime/wire/state.h"

namespace commhook::wire {
namespace {

uint64_t digest_of(const std::string& text) {
  uint64_t value = 0xCBF29CE484222325ULL;  // FNV-1a
  for (const char each : text) {
    value = (value ^ static_cast<uint8_t>(each)) * 0x100000001B3ULL;
  }
  return value;
}

std::string key_of(int rank) { return c10::str("wire/", rank); }

std::exception_ptr error_of(const Failure& failure) {
  return std::make_exception_ptr(PeerError(failure));
}

std::string shape_text(const Shape& shape, const Shape& other) {
  return shape.total == other.total ? "another operation"
                                    : c10::str(shape.total, " bytes (here ", other.total, ")");
}

std::string name_of(const Group& group, int rank) {
  return c10::str("rank ", group.names.empty() ? rank : group.names.at(rank));
}

// What this rank tells the others of its failure.
const std::string& why_of(const Failure& failure) {
  return failure.why.empty() ? failure.text : failure.why;
}

int rank_of(const Group& group, uint64_t id) {
  const auto found = std::find(group.members.begin(), group.members.end(), id);
  return static_cast<int>(found - group.members.begin());
}

// What leave() has said there.
Failure what_left(const Group& group, const Link::Notice& notice, uint64_t id) {
  const bool is_known = notice.key.slot <= group.members.size() &&
                        notice.key.stage <= static_cast<uint32_t>(Failure::Kind::kClosed);
  return {is_known ? static_cast<Failure::Kind>(notice.key.stage) : Failure::Kind::kLeft,
          is_known ? static_cast<int>(notice.key.slot) - 1 : rank_of(group, id), "", notice.text};
}

}  // namespace

PeerError::PeerError(Failure why)
    : DistBackendError({__func__, __FILE__, __LINE__}, why.text), failure(std::move(why)) {}

struct Channel::Inner {
  // What was begun and is not over: exchanges with their callbacks, and functions of run().
  struct Busy {
    std::mutex mutex;
    std::condition_variable changed;
    size_t count = 0;

    void add() {
      const std::lock_guard lock(mutex);
      ++count;
    }
    void remove() {
      const std::lock_guard lock(mutex);
      if (--count == 0) {
        changed.notify_all();
      }
    }
  };

  std::shared_ptr<State> state;
  std::shared_ptr<Group> group;
  std::shared_ptr<Busy> busy = std::make_shared<Busy>();
};

Channel::Channel(std::shared_ptr<Inner> inner) : inner_(std::move(inner)) {}

std::shared_ptr<Channel> Channel::join(const std::shared_ptr<Endpoint>& endpoint,
                                       const c10::intrusive_ptr<c10d::Store>& store,
                                       const std::string& name, int rank, int size,
                                       std::chrono::milliseconds timeout,
                                       std::vector<int64_t> names, bool is_held) {
  TORCH_CHECK_VALUE(names.empty() || names.size() == static_cast<size_t>(std::max(size, 0)),
                    "there must be a name for each of ", size, " ranks, got ", names.size());
  TORCH_CHECK_VALUE(store, "a group needs a store");
  TORCH_CHECK_VALUE(size > 0 && rank >= 0 && rank < size, "no rank ", rank, " of ", size);
  const auto& state = endpoint->state_;
  static std::atomic<uint64_t> joined{0};
  const std::string own = c10::str(state->address, ' ', ++joined);
  store->set(key_of(rank), std::vector<uint8_t>(own.begin(), own.end()));
  std::vector<std::string> keys;
  for (int each = 0; each < size; ++each) {
    keys.push_back(key_of(each));
  }
  try {
    store->wait(keys, timeout);
  } catch (const c10::Error&) {
    std::vector<int64_t> missing;
    for (int each = 0; each < size; ++each) {
      if (!store->check({key_of(each)})) {
        missing.push_back(names.empty() ? each : names.at(each));
      }
    }
    TORCH_CHECK_WITH(DistStoreError, missing.empty(), "rank ", c10::Join(", ", missing),
                     " did not come to group '", name, "' within ",
                     static_cast<double>(timeout.count()) / 1000, " s");
    throw;
  }
  std::vector<std::vector<uint8_t>> found;
  if (store->hasExtendedApi()) {
    found = store->multiGet(keys);
  } else {
    std::transform(keys.begin(), keys.end(), std::back_inserter(found),
                   [&](const std::string& key) { return store->get(key); });
  }
  auto group = std::make_shared<Group>();
  group->rank = rank;
  group->names = std::move(names);
  group->is_held = is_held;
  std::string all = name;
  std::vector<Address> addresses;
  for (const auto& each : found) {
    const std::string text(each.begin(), each.end());
    all += '\n' + text;  // no two groups have the same addresses: each says how often it joined
    const auto address = Address::parse(text);
    TORCH_CHECK_WITH(DistStoreError, address, "the store has no address of a rank, but '", text,
                     "'");
    addresses.push_back(*address);
    TORCH_CHECK_VALUE(
        std::count(group->members.begin(), group->members.end(), addresses.back().id) == 0,
        "two ranks of a group use the same endpoint");
    group->members.push_back(addresses.back().id);
  }
  group->digest = digest_of(all);
  std::unique_lock lock(state->mutex);
  TORCH_CHECK_WITH(DistNetworkError, state->stop_at == 0 && !state->is_forked,
                   "the process's endpoint is closed, or a child of fork() uses it");
  for (const Address& each : addresses) {
    if (each.id != state->id) {
      (void)state->peer(each);
    }
  }
  state->groups[group->digest] = group;
  Calls calls;
  const auto said = state->unclaimed.find(group->digest);
  if (said != state->unclaimed.end()) {
    const auto notices = std::move(said->second);
    state->unclaimed.erase(said);
    for (const auto& [id, notice] : notices) {
      state->take(notice, state->peers.at(id), calls);
    }
  }
  lock.unlock();
  make(calls);
  auto inner = std::make_shared<Inner>();
  inner->state = state;
  inner->group = std::move(group);
  return std::shared_ptr<Channel>(new Channel(std::move(inner)));
}

Channel::~Channel() { close(); }

int Channel::rank() const { return inner_->group->rank; }

int Channel::size() const { return static_cast<int>(inner_->group->members.size()); }

void Channel::run(std::function<void()> function, bool has_waits) {
  inner_->busy->add();
  inner_->state->workers.run(
      [busy = inner_->busy, function = std::move(function)]() mutable {
        function();
        function = nullptr;
        busy->remove();
      },
      has_waits);
}

std::shared_ptr<const void> Channel::busy() const {
  inner_->busy->add();
  return {nullptr, [busy = inner_->busy](const void*) { busy->remove(); }};
}

std::optional<bool> Channel::drain(std::chrono::milliseconds longest) const {
  if (Workers::is_one()) {
    return false;  // it would wait for itself
  }
  auto& busy = *inner_->busy;
  std::unique_lock lock(busy.mutex);
  const bool has_waited = busy.count > 0;
  if (!busy.changed.wait_for(lock, longest, [&] { return busy.count == 0; })) {
    return std::nullopt;
  }
  return has_waited;
}

std::optional<Failure> Channel::failure() const {
  const std::lock_guard lock(inner_->state->mutex);
  return inner_->group->failure;
}

void Channel::begin(Exchange exchange, Done done) {
  State& state = *inner_->state;
  const auto& group = inner_->group;
  inner_->busy->add();
  done = [busy = inner_->busy, done = std::move(done)](std::exception_ptr error) {
    done(std::move(error));
    busy->remove();
  };
  Calls calls;
  {
    const std::lock_guard lock(state.mutex);
    if (state.is_forked && !group->failure) {
      group->failure = {Failure::Kind::kClosed, group->rank,
                        "a child of fork() has no connections; make a group there"};
    }
    const size_t count = exchange.sends.size() + exchange.receives.size();
    if (group->failure || count == 0) {
      calls.push_back({std::move(done), group->failure ? error_of(*group->failure) : nullptr,
                       std::move(exchange.owner)});
    } else {
      const Time time = State::now();
      const uint64_t first = state.next_message;
      state.next_message += count;
      Pending& pending = state.pending[first];
      pending.group = group;
      pending.exchange = std::move(exchange);
      pending.done = std::move(done);
      pending.is_open.assign(count, true);
      pending.open = count;
      const auto timeout = std::min(pending.exchange.timeout, kLongestTimeout);
      pending.deadline = time + timeout.count() * (kSecond / 1000);
      // All are posted before any bytes move: these may end the exchange.
      std::set<Peer*> used;
      uint64_t number = first;
      const auto post = [&](const Message& message, bool is_send) {
        Peer& peer = state.peers.at(group->members.at(message.peer));
        const Key key{group->digest, 0, message.slot, message.stage};
        const Shape shape{message.size, pending.exchange.form};
        if (is_send) {
          peer.link->send(number++, key, message.memory, shape);
        } else {
          peer.link->receive(number++, key, message.memory, shape);
        }
        used.insert(&peer);
      };
      for (const Message& each : pending.exchange.sends) {
        post(each, true);
      }
      for (const Message& each : pending.exchange.receives) {
        post(each, false);
      }
      for (Peer* each : used) {
        state.need(*each, time);
        state.flush(*each, time);
      }
    }
    state.settle(calls);
    state.find_left(*group, calls);
  }
  make(calls);
}

void Channel::fail(const std::string& why) {
  Calls calls;
  {
    const std::lock_guard lock(inner_->state->mutex);
    inner_->state->fail(*inner_->group, {Failure::Kind::kTold, rank(), why}, calls);
  }
  make(calls);
}

void Channel::close(const std::string& why, Failure::Kind kind, std::optional<int> blamed) {
  State& state = *inner_->state;
  const auto& group = inner_->group;
  const int at_fault = blamed.value_or(group->rank);
  TORCH_CHECK_VALUE(at_fault >= -1 && at_fault < size(), "no rank ", at_fault, " of ", size());
  Calls calls;
  {
    const std::lock_guard lock(state.mutex);
    state.fail(
        *group,
        {Failure::Kind::kClosed, group->rank,
         why.empty() ? c10::str(name_of(*group, group->rank), " has closed its group") : why, why},
        calls);
    state.leave(*group, {kind, at_fault, "", why});
    state.groups.erase(group->digest);
  }
  make(calls);
}

// ---- with the mutex -----------------------------------------------------------------------------

void State::settle(Calls& calls) {
  while (!news.empty()) {
    for (Peer* peer : std::exchange(news, {})) {
      peer->has_news = false;
      const auto notices = peer->link->take_notices();
      const auto take_all = [&](bool of_leaving) {
        for (const auto& each : notices) {
          if ((each.kind == Kind::kLeft) == of_leaving) {
            take(each, *peer, calls);
          }
        }
      };
      take_all(false);
      for (const auto& each : peer->link->take_completions()) {
        take(each, *peer, calls);
      }
      take_all(true);  // after the messages that came before
    }
  }
}

void State::take(const Link::Completion& completion, Peer& peer, Calls& calls) {
  auto found = pending.upper_bound(completion.id);
  if (found == pending.begin()) {
    return;
  }
  --found;
  Pending& waiting = found->second;
  const uint64_t index = completion.id - found->first;
  if (index >= waiting.is_open.size() || !waiting.is_open[index]) {
    return;  // its exchange has failed
  }
  if (completion.result == Link::Result::kEpochOver) {
    return;  // a notice says why
  }
  if (completion.result == Link::Result::kDone) {
    ++(index < waiting.exchange.sends.size() ? counts.sent_messages : counts.received_messages);
    waiting.is_open[index] = false;
    if (--waiting.open == 0) {
      calls.push_back({std::move(waiting.done), nullptr, std::move(waiting.exchange.owner)});
      pending.erase(found);
    }
    return;
  }
  Group& group = *waiting.group;
  Failure failure{Failure::Kind::kMisfit, rank_of(group, peer.address.id), ""};
  const std::string who = name_of(group, failure.rank);
  if (completion.result == Link::Result::kEnded) {
    switch (peer.link->ended()) {
      case Rail::End::kStopped:
        failure.kind = Failure::Kind::kEnded;
        failure.text = who + ": its process has ended";
        break;
      case Rail::End::kLost:
        failure.kind = Failure::Kind::kLost;
        failure.text =
            c10::str(who, ": no sign of its host for ", options.lost_after / kSecond, " s");
        break;
      case Rail::End::kRefused:
        if (peer.link->end_text() == kLostText) {
          failure.kind = Failure::Kind::kLost;
          failure.text = who + ": it counts this process as lost";
          break;
        }
        failure.text = who + " and this process do not fit: " + peer.link->end_text();
        break;
      default:
        failure.text = who + " does not keep to the protocol";
    }
  } else {
    failure.text = who + ": its message does not fit";  // a notice has said more
  }
  failure.text += c10::str(" (in ", waiting.exchange.what, ")");
  fail(group, std::move(failure), calls);
}

void State::take(const Link::Notice& notice, Peer& peer, Calls& calls) {
  const auto found = groups.find(notice.key.channel);
  if (found == groups.end()) {
    if (unclaimed.size() < kMostRemembered) {
      unclaimed[notice.key.channel].emplace_back(peer.address.id, notice);
    }
    return;
  }
  const auto group = found->second;
  if (notice.kind == Kind::kLeft) {
    group->left[peer.address.id] = what_left(*group, notice, peer.address.id);
    find_left(*group, calls);
    return;
  }
  Failure failure{Failure::Kind::kTold, rank_of(*group, peer.address.id), notice.text};
  if (notice.kind == Kind::kMisfit) {
    failure.kind = Failure::Kind::kMisfit;
    std::string what = c10::str("message ", notice.key.slot);
    for (const auto& [first, waiting] : pending) {
      const auto& messages = notice.is_sent ? waiting.exchange.sends : waiting.exchange.receives;
      if (waiting.group == group &&
          std::any_of(messages.begin(), messages.end(), [&](const Channel::Message& each) {
            return each.slot == notice.key.slot && each.stage == notice.key.stage;
          })) {
        what = waiting.exchange.what;
      }
    }
    failure.text =
        c10::str(what, ": ", name_of(*group, failure.rank),
                 notice.is_sent ? " expects " : " sends ", shape_text(notice.other, notice.own));
  }
  fail(*group, std::move(failure), calls);
}

void State::fail(Group& group, Failure failure, Calls& calls) {
  if (group.failure) {
    return;
  }
  group.failure = failure;
  const auto kind = failure.kind;
  for (const uint64_t member : group.members) {
    const auto found = peers.find(member);
    if (found != peers.end() && !is_forked) {
      if (kind == Failure::Kind::kMisfit || kind == Failure::Kind::kTold) {
        found->second.link->begin_epoch(group.digest, 1, failure.text);
      }
      found->second.link->abandon(group.digest);
      flush(found->second, now());
    }
  }
  if (!group.is_held && kind != Failure::Kind::kClosed) {
    leave(group, {Failure::Kind::kLeft, group.rank, "", why_of(failure)});
  }
  for (auto each = pending.begin(); each != pending.end();) {
    Pending& waiting = each->second;
    if (waiting.group.get() != &group) {
      ++each;
      continue;
    }
    calls.push_back(
        {std::move(waiting.done), error_of(failure), std::move(waiting.exchange.owner)});
    each = pending.erase(each);
  }
}

void State::leave(Group& group, const Failure& failure) {
  if (std::exchange(group.has_left, true) || is_forked) {
    return;
  }
  const Key key{group.digest, 0, static_cast<uint32_t>(failure.rank + 1),
                static_cast<uint32_t>(failure.kind)};
  for (const uint64_t member : group.members) {
    const auto found = peers.find(member);
    if (found != peers.end()) {
      found->second.link->leave(key, failure.why);
      flush(found->second, now());
    }
  }
}

// Fails a group if a message to or from a rank that has left is awaited.
void State::find_left(Group& group, Calls& calls) {
  if (group.left.empty() || group.failure) {
    return;
  }
  for (const auto& [first, waiting] : pending) {
    for (size_t i = 0; waiting.group.get() == &group && i < waiting.is_open.size(); ++i) {
      const size_t sends = waiting.exchange.sends.size();
      const int rank =
          (i < sends ? waiting.exchange.sends[i] : waiting.exchange.receives[i - sends]).peer;
      const auto left = group.left.find(group.members.at(rank));
      if (waiting.is_open[i] && left != group.left.end()) {
        Failure failure = left->second;
        failure.text =
            c10::str(name_of(group, rank), " has left the group (in ", waiting.exchange.what, ")",
                     failure.why.empty() ? "" : ": ", failure.why);
        fail(group, std::move(failure), calls);
        return;
      }
    }
  }
}

void State::find_late(Time time, Calls& calls) {
  std::vector<std::pair<std::shared_ptr<Group>, Failure>> late;
  for (const auto& [first, waiting] : pending) {
    if (time < waiting.deadline) {
      continue;
    }
    Failure failure{Failure::Kind::kTimeout, -1, ""};
    std::set<int> peers;
    for (size_t i = 0; i < waiting.is_open.size(); ++i) {
      const size_t sends = waiting.exchange.sends.size();
      if (waiting.is_open[i]) {
        const auto& message =
            i < sends ? waiting.exchange.sends[i] : waiting.exchange.receives[i - sends];
        failure.rank = failure.rank < 0 ? message.peer : failure.rank;
        peers.insert(message.peer);
      }
    }
    std::string ranks;
    for (const int peer : peers) {
      ranks += c10::str(ranks.empty() ? "" : ", ", name_of(*waiting.group, peer));
    }
    const double seconds = static_cast<double>(waiting.exchange.timeout.count()) / 1000;
    failure.text = c10::str(name_of(*waiting.group, waiting.group->rank), ": timeout after ",
                            seconds, " s in ", waiting.exchange.what, ", which waits for ", ranks);
    late.emplace_back(waiting.group, std::move(failure));
  }
  for (auto& [group, failure] : late) {
    fail(*group, std::move(failure), calls);
  }
}

}  // namespace commhook::wire
