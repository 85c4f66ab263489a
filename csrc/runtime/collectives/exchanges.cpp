#include "runtime/collectives/exchanges.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

using c10::ivalue::Future;

namespace commhook {
namespace {

// Far from those that people use on the same group. Two before it are of messages that never come.
constexpr int64_t kFirstTag = int64_t{1} << 30;
constexpr int64_t kStages = 2;

constexpr const char* kStopped = "exchange: the process group was closed (gloo)";

constexpr std::chrono::hours kEver{24 * 365 * 10};

// Whether this thread waits for messages. It is none of Gloo's, and may hold a group.
thread_local bool is_runner = false;

bool are_messages(const std::vector<at::Tensor>& messages, int64_t size) {
  return static_cast<int64_t>(messages.size()) == size &&
         std::all_of(messages.begin(), messages.end(), [](const at::Tensor& message) {
           return message.defined() && message.dim() == 1 && message.device().is_cpu() &&
                  message.scalar_type() == at::kByte && message.is_contiguous();
         });
}

// Whether all went well; false where they were aborted. Throws what failed.
bool wait_for(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  return std::all_of(works.begin(), works.end(), [](const auto& work) { return work->wait(); });
}

const Exchanges::Group& checked(const Exchanges::Group& group) {
  TORCH_CHECK_VALUE(group, "exchange: there must be process groups");
  return group;
}

}  // namespace

Exchanges::Exchanges(const Group& up, const Group& down, bool is_second, std::vector<int64_t> names)
    : up_(checked(up)),
      down_(checked(down)),
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
  down_ = c10::weak_intrusive_ptr<c10d::ProcessGroup>(down);
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
                    "exchange: there must be flat bytes on the CPU for each rank");
  const int tag = tag_of(place, stage);
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!stopped_, kStopped);
    TORCH_CHECK_VALUE(expected_.count(tag) == 0, "exchange: stage ", stage, " of place ", place,
                      " is expected already");
    ++issuing_;
  }
  Parts parts;
  std::exception_ptr error;
  try {
    ask(outputs, tag, parts);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    --issuing_;
    if (error) {
      for (auto& [rank, works] : parts) {
        failed_.push_back(std::move(works));
      }
    } else {
      expected_.emplace(tag, Expected{std::move(outputs), std::move(parts)});
    }
  }
  ended_.notify_all();
  if (error) {
    std::rethrow_exception(error);
  }
}

c10::intrusive_ptr<Future> Exchanges::start(std::vector<at::Tensor> inputs,
                                            std::vector<at::Tensor> outputs, at::Tensor result,
                                            int64_t place, int64_t stage) {
  TORCH_CHECK_VALUE(are_messages(inputs, size_) && are_messages(outputs, size_),
                    "exchange: there must be flat bytes on the CPU for each rank");
  const int tag = tag_of(place, stage);
  auto done = c10::make_intrusive<Future>(c10::TensorType::get());
  Messages messages{std::move(inputs), std::move(outputs), std::move(result), done, tag};
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!stopped_, kStopped);
    if (is_second_ && !is_runner) {
      if (issuer_ == std::thread::id()) {
        std::thread issuer([self = shared_from_this()] { self->issue_all(); });
        issuer_ = issuer.get_id();
        issuer.detach();  // who waits for its end calls stop()
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
  tell(*done, outcome, messages.result);  // may run what calls stop()
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
  try {
    return {post(messages), nullptr};
  } catch (...) {  // connections that have failed before, which other collectives tell so too
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

template <typename Call>
Exchanges::WorkPtr Exchanges::with(int rank, const Call& call) const {
  try {
    return call();
  } catch (...) {
    std::rethrow_exception(named(lanes_[rank], std::current_exception()));
  }
}

std::pair<Exchanges::Group, Exchanges::Group> Exchanges::groups() {
  const Group up = up_.lock();
  Group down;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!stopped_, kStopped);
    down = down_.lock();
  }
  TORCH_CHECK(up && down, kStopped);
  return {up, down};
}

void Exchanges::ask(const std::vector<at::Tensor>& outputs, int tag, Parts& parts) {
  const auto [up, down] = groups();
  for (int distance = 1; distance < size_; ++distance) {
    const int from = (rank_ + size_ - distance) % size_;
    parts.emplace_back(from, Works());
    const Group& group = from < rank_ ? up : down;
    watch(from, group);
    std::vector<at::Tensor> received{outputs[from]};
    if (received[0].numel() != 0) {
      parts.back().second.push_back(
          with(from, [&, from = from] { return group->recv(received, from, tag); }));
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
        "exchange: what comes from rank ", rank, " is expected elsewhere");
  }
  return std::move(expected_.extract(found).mapped().parts);
}

bool Exchanges::post(const Messages& messages) {
  const auto [up, down] = groups();
  Parts parts = take_expected(messages);
  const auto exchange = std::make_shared<Exchange>(Exchange{messages.done, messages.result});
  try {
    if (parts.empty()) {
      // What is to come is asked for first: then no message has to wait for that.
      ask(messages.outputs, messages.tag, parts);
    }
    for (auto& [to, works] : parts) {
      std::vector<at::Tensor> sent{messages.inputs[to]};
      if (sent[0].numel() != 0) {
        const Group& group = rank_ < to ? up : down;
        works.push_back(with(to, [&, to = to] { return group->send(sent, to, messages.tag); }));
      }
    }
    parts.erase(std::remove_if(parts.begin(), parts.end(),
                               [](const auto& part) { return part.second.empty(); }),
                parts.end());
    if (!parts.empty()) {
      add(parts, exchange);  // a copy: see below
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

void Exchanges::watch(int rank, const Group& group) {
  Lane& lane = lanes_[rank];
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(lane.is_watched, true)) {
      return;
    }
  }
  std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
  const int tag = static_cast<int>(kFirstTag - 1 - (is_second_ ? 1 : 0));
  auto watched = with(rank, [&] { return group->recv(nothing, rank, tag); });
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);  // meanwhile
  lane.watched = std::move(watched);
  std::thread watcher([self = shared_from_this(), &lane] { self->run_watcher(lane); });
  lane.watcher = watcher.get_id();
  watcher.detach();  // who waits for its end calls stop()
}

void Exchanges::run_watcher(Lane& lane) {
  std::unique_lock lock(mutex_);
  const WorkPtr watched = lane.watched;
  lock.unlock();
  std::exception_ptr lost;
  try {
    watched->wait(std::chrono::duration_cast<std::chrono::milliseconds>(kEver));
  } catch (...) {
    lost = named(lane, std::current_exception());
  }
  lock.lock();
  lane.lost = lost;
  for (const auto& [works, exchange] : lane.under_way) {
    for (const auto& work : works) {
      work->abort();
    }
  }
  lane.watcher = {};
  ended_.notify_all();
}

void Exchanges::add(Parts parts, std::shared_ptr<Exchange> exchange) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);  // meanwhile
  exchange->missing = parts.size();
  for (auto& [rank, works] : parts) {
    Lane& lane = lanes_[rank];
    if (lane.runner == std::thread::id()) {
      std::thread runner([self = shared_from_this(), &lane] { self->run(lane); });
      lane.runner = runner.get_id();
      runner.detach();  // who waits for its end calls stop()
    }
    if (lane.lost) {  // meanwhile
      for (const auto& work : works) {
        work->abort();
      }
    }
    lane.under_way.emplace_back(std::move(works), exchange);
    lane.added.notify_one();
  }
}

void Exchanges::run(Lane& lane) {
  is_runner = true;
  std::unique_lock lock(mutex_);
  while (true) {
    lane.added.wait(lock, [&] { return stopped_ || !lane.under_way.empty(); });
    if (lane.under_way.empty()) {
      break;
    }
    Works works = lane.under_way.front().first;  // stop() finds them in their place
    lock.unlock();
    std::exception_ptr error;
    try {
      if (!wait_for(works)) {
        error = std::make_exception_ptr(std::runtime_error(kStopped));
      }
    } catch (...) {
      error = named(lane, std::current_exception());
    }
    lock.lock();
    auto exchange = std::move(lane.under_way.front().second);
    lane.under_way.pop_front();
    if (error) {
      error = lane.lost ? lane.lost : error;
      failed_.push_back(std::move(works));
    }
    --exchange->missing;
    lane.is_telling = true;
    const bool ends = !exchange->ended && (error || exchange->missing == 0);
    exchange->ended = exchange->ended || ends;
    lock.unlock();
    works.clear();
    if (ends && error) {
      exchange->done->setError(error);
    } else if (ends) {
      exchange->done->markCompleted(exchange->result);
    }
    exchange.reset();
    lock.lock();
    lane.is_telling = false;
    ended_.notify_all();
  }
  lane.runner = {};
  ended_.notify_all();
}

std::exception_ptr Exchanges::named(const Lane& lane, const std::exception_ptr& error) const {
  const auto rank = static_cast<size_t>(&lane - lanes_.data());
  const auto where = c10::str("exchange: with rank ",
                              names_.empty() ? static_cast<int64_t>(rank) : names_[rank], ": ");
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& raised) {
    return std::make_exception_ptr(std::runtime_error(where + raised.what_without_backtrace()));
  } catch (const std::exception& raised) {
    return std::make_exception_ptr(std::runtime_error(where + raised.what()));
  } catch (...) {
    return error;
  }
}

void Exchanges::finish() {
  if (is_runner) {
    return;
  }
  std::unique_lock lock(mutex_);
  const bool is_issuer = issuer_ == std::this_thread::get_id();
  ended_.wait(lock, [&] {
    return (is_issuer || issuer_ == std::thread::id()) && issuing_ == 0 &&
           std::all_of(lanes_.begin(), lanes_.end(),
                       [](const Lane& lane) { return lane.under_way.empty() && !lane.is_telling; });
  });
}

void Exchanges::stop() {
  std::unique_lock lock(mutex_);
  stopped_ = true;
  for (auto& lane : lanes_) {
    lane.added.notify_all();
    if (lane.watched) {
      lane.watched->abort();
    }
    for (const auto& [works, exchange] : lane.under_way) {
      for (const auto& work : works) {
        work->abort();
      }
    }
  }
  const auto is_over = [](std::thread::id thread) {
    return thread == std::thread::id() || thread == std::this_thread::get_id();
  };
  ended_.wait(lock, [&] {
    return issuing_ == 0 && is_over(issuer_) &&
           std::all_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
             return is_over(lane.runner) && is_over(lane.watcher);
           });
  });
  failed_.clear();
  expected_.clear();
  for (auto& lane : lanes_) {
    lane.watched.reset();
  }
}

}  // namespace commhook
