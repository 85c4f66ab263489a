// Which processes are alive, as they write to a store.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace commhook {

// Counts up a number in a store for as long as the process runs, and reads others' numbers, on a
// thread of its own, which never takes the GIL: a process that computes in Python is alive, too.
class SignsOfLife {
 public:
  using Clock = std::chrono::steady_clock;
  struct Sign {
    int64_t number;  // that was read last
    double seconds;  // since it changed
  };

  // store: nobody else's, since a request to it may wait. interval: between signs, in seconds.
  SignsOfLife(c10::intrusive_ptr<c10d::Store> store, std::string own, double interval);
  SignsOfLife(const SignsOfLife&) = delete;
  SignsOfLife& operator=(const SignsOfLife&) = delete;
  ~SignsOfLife();

  // Read these keys instead of those before. What is known of the ones that stay is kept.
  void watch(const std::vector<std::string>& keys);

  // By key: what is known. Of a key that has not been read yet nothing is. Time in which the store
  // was out of reach does not count: nothing could be read.
  std::map<std::string, Sign> signs() const;

  // Since the store has answered last, in seconds.
  double seconds_without_store() const;

  // Show no more signs. Returns when the thread has ended. Called without the GIL.
  void stop();

 private:
  struct Seen {
    int64_t number = 0;
    Clock::duration unchanged{0};  // time in which it was read and had not changed
    bool is_there = false;
  };

  void run();

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string own_;
  const Clock::duration interval_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Seen> seen_;
  Clock::time_point answered_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace commhook
