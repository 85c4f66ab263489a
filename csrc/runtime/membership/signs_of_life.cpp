#include "runtime/membership/signs_of_life.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <optional>
#include <system_error>

namespace commhook {
namespace {

// The number under a key: 0 if there is none, nothing if others have written another text. There, a
// store closes the connection of whoever calls add().
std::optional<int64_t> number_under(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> nothing{'-'};
  const auto found = store.compareSet(key, nothing, nothing);  // get() waits for missing keys
  if (found == nothing) {
    return 0;
  }
  const std::string text(found.begin(), found.end());
  int64_t number = 0;
  const auto* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(number) : std::nullopt;
}

double seconds_of(SignsOfLife::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

SignsOfLife::SignsOfLife(c10::intrusive_ptr<c10d::Store> store, std::string own, double interval)
    : store_(std::move(store)),
      own_(std::move(own)),
      interval_(
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(interval))),
      answered_(Clock::now()) {
  TORCH_CHECK_VALUE(interval > 0 && interval <= 3600,
                    "SignsOfLife: interval must be above 0 and at most 3600 s, got ", interval);
  thread_ = std::thread([this] { run(); });
}

SignsOfLife::~SignsOfLife() { stop(); }

void SignsOfLife::watch(const std::vector<std::string>& keys) {
  const std::lock_guard lock(mutex_);
  std::map<std::string, Seen> kept;
  for (const auto& key : keys) {
    const auto found = seen_.find(key);
    kept[key] = found == seen_.end() ? Seen{} : found->second;
  }
  seen_ = std::move(kept);
}

std::map<std::string, SignsOfLife::Sign> SignsOfLife::signs() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, Sign> found;
  for (const auto& [key, seen] : seen_) {
    if (seen.is_there) {
      found[key] = {seen.number, seconds_of(seen.unchanged)};
    }
  }
  return found;
}

double SignsOfLife::seconds_without_store() const {
  const std::lock_guard lock(mutex_);
  return seconds_of(Clock::now() - answered_);
}

void SignsOfLife::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
    thread_.join();
  }
}

void SignsOfLife::run() {
  c10::setThreadName("commhook_signs");
  auto next = Clock::now();
  while (true) {
    const auto begun = Clock::now();
    std::optional<std::map<std::string, int64_t>> numbers;
    try {
      std::vector<std::string> keys;
      {
        const std::lock_guard lock(mutex_);
        for (const auto& [key, seen] : seen_) {
          keys.push_back(key);
        }
      }
      store_->set(own_, std::to_string(++given_));
      numbers.emplace();
      for (const auto& key : keys) {
        if (const auto number = number_under(*store_, key)) {
          (*numbers)[key] = *number;
        }
      }
    } catch (const std::exception&) {  // the store is out of reach; the next round tries again
      numbers.reset();
    }
    std::unique_lock lock(mutex_);
    if (numbers) {
      const auto now = Clock::now();
      // Only time in which the store could be read counts for an unchanged number.
      const auto since = std::min(now - answered_, 2 * interval_ + (now - begun));
      answered_ = now;
      for (const auto& [key, number] : *numbers) {
        const auto found = seen_.find(key);
        if (found == seen_.end()) {
          continue;  // no longer watched
        }
        auto& seen = found->second;
        const bool is_new = !seen.is_there || seen.number != number;
        seen.unchanged = is_new ? Clock::duration::zero() : seen.unchanged + since;
        seen.number = number;
        seen.is_there = true;
      }
    }
    next = std::max(next + interval_, Clock::now());
    changed_.wait_until(lock, next, [this] { return stopped_; });
    if (stopped_) {
      return;
    }
  }
}

}  // namespace commhook
