// The waits of exchanges: threads that wait for messages, threads that notice lost connections, and
// the end of both.
#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <utility>

#include "runtime/collectives/exchange_internals.h"
#include "runtime/collectives/exchanges.h"

namespace commhook {
namespace {

constexpr std::chrono::hours kEver{24 * 365 * 10};
// How long messages that came before the end of a connection may take to be noticed.
constexpr std::chrono::milliseconds kNoticed{250};

// Returns false if a Work was aborted. Throws the error of a failed one.
bool wait_for(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  return std::all_of(works.begin(), works.end(), [](const auto& work) { return work->wait(); });
}

}  // namespace

thread_local bool is_runner = false;

void Exchanges::watch(int rank, size_t connection, const Group& group) {
  Lane& lane = lanes_[rank];
  std::unique_lock lock(mutex_);
  while (lane.watched.size() <= connection) {
    lane.watched.emplace_back();
  }
  Watched& watched = lane.watched[connection];
  lock.unlock();
  watch_with(rank, watched, group);
}

void Exchanges::watch_up(int rank, const Group& up, const Group& down) {
  Lane& lane = lanes_[rank];
  std::unique_lock lock(mutex_);
  // Receives from a lower rank use `up`, those from a higher one `down`.
  const bool is_watched = down == up && !lane.watched.empty() && lane.watched[0].is_there;
  lock.unlock();
  if (rank < rank_) {
    watch(rank, 0, up);
  } else if (!is_watched) {
    watch_with(rank, lane.up, up);
  }
}

void Exchanges::watch_with(int rank, Watched& watched, const Group& group) {
  Lane& lane = lanes_[rank];
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(watched.is_there, true)) {
      return;
    }
  }
  const int tag = static_cast<int>(kFirstTag - 1 - (is_second_ ? 1 : 0));
  WorkPtr work;
  try {
    work = with(rank, [&] { return ask_early(group, at::empty({1}, at::kByte), rank, tag); });
  } catch (...) {
    const std::lock_guard lock(mutex_);
    lane.lost = lane.lost ? lane.lost : std::current_exception();
    throw;
  }
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);  // may have been stopped meanwhile
  watched.work = std::move(work);
  std::thread watcher(
      [self = shared_from_this(), &lane, &watched] { self->run_watcher(lane, watched); });
  watched.watcher = watcher.get_id();
  watcher.detach();  // stop() waits for its end
}

void Exchanges::run_watcher(Lane& lane, Watched& watched) {
  std::unique_lock lock(mutex_);
  const WorkPtr work = watched.work;
  lock.unlock();
  std::exception_ptr lost;
  try {
    work->wait(std::chrono::duration_cast<std::chrono::milliseconds>(kEver));
  } catch (...) {
    lost = named(lane, std::current_exception());
  }
  lock.lock();
  lane.lost = lane.lost ? lane.lost : lost;
  // A peer may send its last message and close its connections at once. In Gloo, an abort takes
  // precedence over a message that came before it. Works of a closed connection end by themselves.
  if (lost) {
    const int64_t present = lane.ended + static_cast<int64_t>(lane.under_way.size());
    ended_.wait_for(lock, kNoticed,
                    [&] { return stopped_ || (lane.ended >= present && lane.awaited.empty()); });
  }
  if (lost || stopped_) {
    abort_all(lane);
  }
  watched.watcher = {};
  ended_.notify_all();
}

void Exchanges::add(Parts parts, std::shared_ptr<Exchange> exchange) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);  // may have been stopped meanwhile
  exchange->missing = parts.size();
  for (auto& [rank, works] : parts) {
    Lane& lane = lanes_[rank];
    if (lane.runner == std::thread::id()) {
      std::thread runner([self = shared_from_this(), &lane] { self->run(lane); });
      lane.runner = runner.get_id();
      runner.detach();  // stop() waits for its end
    }
    if (lane.lost) {  // the connection may have been lost meanwhile
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
    Works works = lane.under_way.front().first;  // a copy: stop() needs the originals
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
    ++lane.ended;
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

void Exchanges::abort_all(const Lane& lane) {
  for (const auto& [works, exchange] : lane.under_way) {
    for (const auto& work : works) {
      work->abort();
    }
  }
  for (const auto& work : lane.awaited) {
    work->abort();
  }
}

void Exchanges::finish_messages(const std::vector<int>& ranks,
                                const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  TORCH_CHECK_VALUE(ranks.size() == works.size(),
                    "exchange: ranks and works must have the same length, got ", ranks.size(),
                    " and ", works.size());
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_ && rank != rank_,
                      "exchange: ranks must be other ranks of ", size_, ", got ", rank);
  }
  const WithoutModes without;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!stopped_, kStopped);
    ++issuing_;  // stop() waits until it is 0
    for (size_t i = 0; i < works.size(); ++i) {
      lanes_[ranks[i]].awaited.push_back(works[i]);
    }
  }
  std::exception_ptr error;
  try {
    const auto [up, down] = groups(std::numeric_limits<int64_t>::max())[0];
    for (const int rank : ranks) {
      try {
        watch_up(rank, up, down);
      } catch (const std::exception&) {  // lost, which watch_with() has noted
      }
    }
  } catch (const std::exception&) {  // the groups are gone, or all is stopped
    error = std::current_exception();
  }
  const auto is_lost = [&](int rank) { return lanes_[rank].lost != nullptr; };
  {
    const std::lock_guard lock(mutex_);
    if (std::any_of(ranks.begin(), ranks.end(), is_lost)) {
      abort_later();
    }
  }
  for (size_t i = 0; i < works.size() && !error; ++i) {
    Lane& lane = lanes_[ranks[i]];
    try {
      if (!finish_message(lane, works[i])) {
        const std::lock_guard lock(mutex_);
        const auto stopped = std::make_exception_ptr(std::runtime_error(kStopped));
        error = lane.lost ? lane.lost : stopped;
      }
    } catch (const std::exception&) {
      error = named(lane, std::current_exception());
    }
  }
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < works.size(); ++i) {
      auto& awaited = lanes_[ranks[i]].awaited;
      awaited.erase(std::find(awaited.begin(), awaited.end(), works[i]));
    }
    if (error) {
      failed_.push_back(works);
    }
    --issuing_;
  }
  ended_.notify_all();
  if (error) {
    std::rethrow_exception(error);
  }
}

bool Exchanges::finish_message(Lane& lane, const WorkPtr& work) {
  if (work->wait()) {
    return true;
  }
  {
    const std::lock_guard lock(mutex_);
    if (stopped_ || !lane.lost) {
      return false;
    }
    // An abort takes precedence over a message that is complete, and this thread may not have run
    // since. The next wait returns at once if it is.
    abort_later();
  }
  return work->wait();
}

void Exchanges::abort_later() {
  ++issuing_;
  std::thread([self = shared_from_this()] {
    std::unique_lock lock(self->mutex_);
    self->ended_.wait_for(lock, kNoticed, [&] { return self->stopped_; });
    for (const auto& lane : self->lanes_) {
      if (lane.lost) {
        for (const auto& work : lane.awaited) {
          work->abort();
        }
      }
    }
    --self->issuing_;
    self->ended_.notify_all();
  }).detach();  // stop() waits for its end
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
    for (auto& watched : lane.watched) {
      if (watched.work) {
        watched.work->abort();
      }
    }
    if (lane.up.work) {
      lane.up.work->abort();
    }
    abort_all(lane);
  }
  const auto is_over = [](std::thread::id thread) {
    return thread == std::thread::id() || thread == std::this_thread::get_id();
  };
  ended_.wait(lock, [&] {
    return issuing_ == 0 && is_over(issuer_) &&
           std::all_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
             return is_over(lane.runner) && is_over(lane.up.watcher) &&
                    std::all_of(lane.watched.begin(), lane.watched.end(),
                                [&](const Watched& watched) { return is_over(watched.watcher); });
           });
  });
  failed_.clear();
  expected_.clear();
  for (auto& lane : lanes_) {
    for (auto& watched : lane.watched) {
      watched.work.reset();
    }
    lane.up.work.reset();
  }
}

}  // namespace commhook
