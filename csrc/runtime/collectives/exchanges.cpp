#include "runtime/collectives/exchanges.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "runtime/collectives/exchange_internals.h"

using c10::ivalue::Future;

namespace commhook {
namespace {

constexpr int64_t kStages = 2;

// With several connections, a piece of a message has at least kLeastPiece bytes, and begins at a
// multiple of kAligned.
constexpr int64_t kLeastPiece = 64 * 1024;
constexpr int64_t kAligned = 64;

bool are_messages(const std::vector<at::Tensor>& messages, int64_t size) {
  return static_cast<int64_t>(messages.size()) == size &&
         std::all_of(messages.begin(), messages.end(), [](const at::Tensor& message) {
           return message.defined() && message.dim() == 1 && message.device().is_cpu() &&
                  message.scalar_type() == at::kByte && message.is_contiguous();
         });
}

const Exchanges::Group& checked(const Exchanges::Group& group) {
  TORCH_CHECK_VALUE(group, "exchange: a process group must be given, got None");
  return group;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ask_early(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const at::Tensor& output, int rank, int tag) {
  const at::DisableRecordFunctionGuard unseen;
  std::vector<at::Tensor> outputs{output};
  return checked(group)->recv(outputs, rank, tag);
}

Exchanges::Exchanges(const Group& up, const Group& down, bool is_second, std::vector<int64_t> names)
    : connections_{{0, {Connection(checked(up), checked(down))}}},
      size_(up->getSize()),
      rank_(up->getRank()),
      is_second_(is_second),
      names_(std::move(names)),
      lanes_(size_) {
  TORCH_CHECK_VALUE(names_.empty() || static_cast<int64_t>(names_.size()) == size_,
                    "exchange: there must be a name for each of ", size_, " ranks, got ",
                    names_.size());
  TORCH_CHECK_VALUE(down->getSize() == size_ && down->getRank() == rank_,
                    "exchange: both process groups must have the same ranks");
}

int64_t Exchanges::reserve() {
  const std::lock_guard lock(mutex_);
  return reserved_++;
}

void Exchanges::use_down(const Group& down) {
  TORCH_CHECK_VALUE(down && down->getSize() == size_ && down->getRank() == rank_,
                    "exchange: both process groups must have the same ranks");
  const std::lock_guard lock(mutex_);
  auto connections = connections_.back().second;
  connections[0].down = Connection(down, down).down;
  use(std::move(connections));
}

void Exchanges::use(std::vector<Connection> connections) {
  if (connections_.back().first == reserved_) {
    connections_.pop_back();
  }
  connections_.emplace_back(reserved_, std::move(connections));
}

void Exchanges::use_more(const std::vector<Group>& ups, const std::vector<Group>& downs) {
  TORCH_CHECK_VALUE(ups.size() == downs.size(),
                    "exchange: ups and downs must have the same length, got ", ups.size(), " and ",
                    downs.size());
  for (const auto* groups : {&ups, &downs}) {
    for (const auto& group : *groups) {
      TORCH_CHECK_VALUE(group && group->getSize() == size_ && group->getRank() == rank_,
                        "exchange: all process groups must have the same ranks");
    }
  }
  std::unique_lock lock(mutex_);
  // The earlier connections may close from now on, and their end must not count as a lost rank.
  for (auto& lane : lanes_) {
    for (size_t i = 1; i < lane.watched.size(); ++i) {
      if (lane.watched[i].work) {
        lane.watched[i].work->abort();
      }
    }
  }
  ended_.wait(lock, [&] {
    return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
      return std::all_of(
          lane.watched.begin() + std::min<size_t>(1, lane.watched.size()), lane.watched.end(),
          [](const Watched& watched) { return watched.watcher == std::thread::id(); });
    });
  });
  for (auto& lane : lanes_) {
    lane.watched.resize(std::min<size_t>(1, lane.watched.size()));
  }
  std::vector<Connection> connections{connections_.back().second[0]};
  for (size_t i = 0; i < ups.size(); ++i) {
    connections.emplace_back(ups[i], downs[i]);
  }
  use(std::move(connections));
}

int Exchanges::tag_of(int64_t place, int64_t stage) const {
  TORCH_CHECK_VALUE(place >= 0 && stage >= 0 && stage < kStages,
                    "exchange: place must be one that reserve() gave, and stage 0 or 1, got ",
                    place, " and ", stage);
  const int64_t number = (kStages * place + stage) % (kFirstTag / 2);
  return static_cast<int>(kFirstTag + 2 * number + (is_second_ ? 1 : 0));
}

void Exchanges::expect(std::vector<at::Tensor> outputs, int64_t place, int64_t stage) {
  TORCH_CHECK_VALUE(are_messages(outputs, size_),
                    "exchange: outputs must hold a flat uint8 tensor on the CPU for each rank");
  const int tag = tag_of(place, stage);
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) {
      return;
    }
    TORCH_CHECK_VALUE(expected_.count(tag) == 0, "exchange: stage ", stage, " of place ", place,
                      " was expected before");
    ++issuing_;
  }
  const WithoutModes without;
  Parts parts;
  bool is_asked = true;
  try {
    ask(outputs, place, tag, parts);
  } catch (const std::exception&) {
    is_asked = false;
  }
  {
    const std::lock_guard lock(mutex_);
    --issuing_;
    if (is_asked) {
      expected_.emplace(tag, Expected{std::move(outputs), std::move(parts)});
    } else {
      for (auto& [rank, works] : parts) {
        failed_.push_back(std::move(works));
      }
    }
  }
  ended_.notify_all();
}

c10::intrusive_ptr<Future> Exchanges::start(std::vector<at::Tensor> inputs,
                                            std::vector<at::Tensor> outputs, at::Tensor result,
                                            int64_t place, int64_t stage) {
  TORCH_CHECK_VALUE(
      are_messages(inputs, size_) && are_messages(outputs, size_),
      "exchange: inputs and outputs must hold a flat uint8 tensor on the CPU for each rank");
  const int tag = tag_of(place, stage);
  auto done = c10::make_intrusive<Future>(c10::TensorType::get());
  Messages messages{std::move(inputs), std::move(outputs), std::move(result), done, place, tag};
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!stopped_, kStopped);
    if (is_second_ && !is_runner) {
      if (issuer_ == std::thread::id()) {
        std::thread issuer([self = shared_from_this()] { self->issue_all(); });
        issuer_ = issuer.get_id();
        issuer.detach();  // stop() waits for its end
      }
      to_issue_.push_back(std::move(messages));
      return done;
    }
    ++issuing_;
  }
  const Outcome outcome = issue(messages);
  {
    const std::lock_guard lock(mutex_);
    --issuing_;
  }
  ended_.notify_all();
  tell(*done, outcome, messages.result);  // a callback may call stop()
  return done;
}

void Exchanges::issue_all() {
  std::unique_lock lock(mutex_);
  while (!to_issue_.empty()) {
    Messages messages = std::move(to_issue_.front());
    to_issue_.pop_front();
    lock.unlock();
    tell(*messages.done, issue(messages), messages.result);
    messages = {};
    lock.lock();
  }
  issuer_ = {};
  ended_.notify_all();
}

Exchanges::Outcome Exchanges::issue(const Messages& messages) {
  const WithoutModes without;
  const at::DisableRecordFunctionGuard unseen;  // a send may never end; see ask_early()
  try {
    return {post(messages), nullptr};
  } catch (...) {  // connections that failed before; other collectives report these as errors too
    return {true, std::current_exception()};
  }
}

void Exchanges::tell(Future& done, const Outcome& outcome, const at::Tensor& result) {
  if (outcome.error) {
    done.setErrorIfNeeded(outcome.error);
  } else if (outcome.is_over) {
    done.markCompleted(result);
  }
}

std::vector<std::pair<Exchanges::Group, Exchanges::Group>> Exchanges::groups(int64_t place) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);
  std::vector<std::pair<Group, Group>> found;
  const auto of_place = std::find_if(connections_.rbegin(), connections_.rend(),
                                     [&](const auto& each) { return each.first <= place; });
  for (const auto& [up, down] : of_place->second) {
    found.emplace_back(up.lock(), down.lock());
    TORCH_CHECK(found.back().first && found.back().second, kStopped);
  }
  return found;
}

std::vector<at::Tensor> Exchanges::pieces(const at::Tensor& message, size_t connections) {
  const int64_t bytes = message.numel();
  const auto most = static_cast<int64_t>(connections);
  const int64_t count = std::clamp(bytes / kLeastPiece, int64_t{1}, most);
  const int64_t each = ((bytes + count - 1) / count + kAligned - 1) / kAligned * kAligned;
  std::vector<at::Tensor> found;
  for (int64_t begin = 0; begin < bytes; begin += each) {
    found.push_back(message.narrow(0, begin, std::min(each, bytes - begin)));
  }
  return found;
}

void Exchanges::ask(const std::vector<at::Tensor>& outputs, int64_t place, int tag, Parts& parts) {
  const auto connections = groups(place);
  for (int distance = 1; distance < size_; ++distance) {
    const int from = (rank_ + size_ - distance) % size_;
    parts.emplace_back(from, Works());
    const auto asked = pieces(outputs[from], connections.size());
    for (size_t i = 0; i < std::max(asked.size(), size_t{1}); ++i) {
      const Group& group = from < rank_ ? connections[i].first : connections[i].second;
      watch(from, i, group);
      if (i < asked.size()) {
        parts.back().second.push_back(
            with(from, [&, from = from] { return ask_early(group, asked[i], from, tag); }));
      }
    }
  }
}

Exchanges::Parts Exchanges::take_expected(const Messages& messages) {
  const std::lock_guard lock(mutex_);
  const auto found = expected_.find(messages.tag);
  if (found == expected_.end()) {
    return {};
  }
  for (int rank = 0; rank < size_; ++rank) {
    const auto& wanted = found->second.outputs[rank];
    const auto& output = messages.outputs[rank];
    TORCH_CHECK_VALUE(
        rank == rank_ ||
            (output.data_ptr() == wanted.data_ptr() && output.numel() == wanted.numel()),
        "exchange: outputs must be the tensors that expect() was given for this place; that of "
        "rank ",
        rank, " differs");
  }
  return std::move(expected_.extract(found).mapped().parts);
}

bool Exchanges::post(const Messages& messages) {
  const auto connections = groups(messages.place);
  Parts parts = take_expected(messages);
  const auto exchange = std::make_shared<Exchange>(Exchange{messages.done, messages.result});
  try {
    if (parts.empty()) {
      // Receives are issued before sends, so that no message has to wait for its receiver.
      ask(messages.outputs, messages.place, messages.tag, parts);
    }
    for (auto& [to, works] : parts) {
      const auto told = pieces(messages.inputs[to], connections.size());
      for (size_t i = 0; i < told.size(); ++i) {
        const Group& group = rank_ < to ? connections[i].first : connections[i].second;
        std::vector<at::Tensor> sent{told[i]};
        works.push_back(with(to, [&, to = to] { return group->send(sent, to, messages.tag); }));
      }
    }
    parts.erase(std::remove_if(parts.begin(), parts.end(),
                               [](const auto& part) { return part.second.empty(); }),
                parts.end());
    if (!parts.empty()) {
      add(parts, exchange);  // a copy: the catch block below needs parts
    }
    return parts.empty();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    exchange->ended = true;  // for threads that wait for a part of it
    for (auto& [rank, works] : parts) {
      failed_.push_back(std::move(works));
    }
    throw;
  }
}

}  // namespace commhook
