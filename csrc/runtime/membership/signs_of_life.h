// Watches which processes are alive; each shows it by writing to a store.
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

// A thread that increments a number in a store while the process runs, and reads the numbers of
// others. It never takes the GIL: a process that computes in Python is alive, too.
class SignsOfLife {
 public:
  using Clock = std::chrono::steady_clock;
  struct Sign {
    int64_t number;  // the last number read
    double seconds;  // since the number changed
  };

  // store: used by nothing else, since a request to it may wait. interval: between signs, in
  // seconds.
  SignsOfLife(c10::intrusive_ptr<c10d::Store> store, std::string own, double interval);
  SignsOfLife(const SignsOfLife&) = delete;
  SignsOfLife& operator=(const SignsOfLife&) = delete;
  ~SignsOfLife();

  // Sets the keys to read. Keeps the state of keys that were watched before.
  void watch(const std::vector<std::string>& keys);

  // The state of each key that has been read. Time in which the store was out of reach does not
  // count, since nothing could be read.
  std::map<std::string, Sign> signs() const;

  // Seconds since the store last answered.
  double seconds_without_store() const;

  // Stops the signs. Returns when the thread has ended. Called without the GIL.
  void stop();

 private:
  struct Seen {
    int64_t number = 0;
    Clock::duration unchanged{0};  // time in which it was read and did not change
    bool is_there = false;
  };

  void run();

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string own_;
  int64_t given_ = 0;  // the number of signs of this process; used by the thread alone
  const Clock::duration interval_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Seen> seen_;
  Clock::time_point answered_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace commhook
