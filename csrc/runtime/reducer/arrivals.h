// Counts the gradients of a reducer's buckets as autograd computes them, without the GIL. Calls
// Python once for a backward, and once for each full bucket, unless a C++ hook takes the bucket.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/python/py_ref.h"
#include "runtime/reducer/reducer_run.h"

namespace commhook {

class Arrivals {
 public:
  // `listener` is a Python object with these methods:
  //   enter_backward(): the first gradient of another backward has come; calls
  //     count_in_this_backward();
  //   bucket_full(bucket): the bucket's last gradient has come, if the listener has asked for this;
  //   came_again(number): a second gradient for a parameter of such a bucket;
  //   start_failed(error): the error of a C++ hook on a full bucket;
  //   before_capture(): compiled autograd captures a backward.
  // backward() raises their exceptions.
  Arrivals(pybind11::object listener, int64_t parameter_count);

  // Sets the bucket of each parameter, from 0 on. Call it between two backward passes.
  void assign(std::vector<int64_t> bucket_of);

  int64_t parameter_count() const { return parameter_count_; }

  // For each parameter, whether a backward, even a failed one, may have written to its gradient
  // since this was zeroed: uint8, on the CPU. The owner zeroes it between two backward passes.
  const at::Tensor& touched() const { return touched_; }

  // Notes that a backward writes to a parameter's gradient.
  void touch(int64_t number);

  // Notes that a parameter's gradient has come, on any thread. Does not need the GIL.
  void arrive(int64_t number);

  // Counts in the backward of this thread, and reports full buckets: to `run` if given, else to the
  // listener.
  void count_in_this_backward(bool tell_full, std::shared_ptr<ReducerRun> run);

  // Notes that compiled autograd captures a backward with the parameter's gradient. Needs the GIL.
  void capture(int64_t number);

  // Waits for the gradients of the next backward from now on.
  void reset();

  // Calls the listener no more.
  void close();

  // The parameters without a gradient so far.
  std::vector<int64_t> missing() const;

  // The order in which gradients have come since the last call.
  std::vector<int64_t> take_order();
  void stop_noting_order();

 private:
  enum class Event { kCounted, kEnter, kFull, kAgain };
  struct Counted {
    Event event;
    int64_t bucket;
    std::shared_ptr<ReducerRun> run;  // the run of a full bucket
  };
  Counted count(int64_t number, bool entered);
  void reset_locked();
  // Calls a method of the listener; returns false if it is gone.
  template <typename... Arguments>
  bool call(const char* method, Arguments... arguments) const;
  void full(int64_t bucket, ReducerRun* run) const;

  mutable std::mutex mutex_;  // never held while Python runs
  std::shared_ptr<const PyRef> listener_;
  const int64_t parameter_count_;
  const at::Tensor touched_;
  std::vector<int64_t> bucket_of_;
  std::vector<int64_t> bucket_sizes_;
  std::vector<int64_t> pending_;  // missing gradients of each bucket
  std::vector<char> arrived_;     // whether each parameter's gradient has come
  int task_;                      // the autograd engine's number of the backward
  bool tell_full_ = false;
  std::shared_ptr<ReducerRun> run_;
  int captured_task_;  // the engine's number of the last backward that was captured
  bool note_order_ = true;
  std::vector<int64_t> order_;
};

}  // namespace commhook
