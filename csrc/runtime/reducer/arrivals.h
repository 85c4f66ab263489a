// Counts the gradients of a reducer's buckets as autograd computes them, without the GIL. Python is
// entered once for a backward, and once for each bucket that is full, unless a C++ hook takes it.
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
  // `listener` is a Python object with:
  //   enter_backward(): a gradient came in another backward than before; calls
  //     count_in_this_backward();
  //   bucket_full(bucket): its last gradient came, where that has asked to be told;
  //   came_again(number): a second gradient for a parameter of such a bucket;
  //   start_failed(error): what a C++ hook raised when a bucket was full;
  //   before_capture(): compiled autograd takes in a backward.
  // What they raise comes out of backward().
  Arrivals(pybind11::object listener, int64_t parameter_count);

  // The bucket of each parameter, from 0 on. Between two backward passes.
  void assign(std::vector<int64_t> bucket_of);

  int64_t parameter_count() const { return parameter_count_; }

  // For each parameter, whether a backward may have written to its gradient since this was zeroed:
  // uint8, on the CPU. Also one that an exception ended. It is zeroed between two backward passes.
  const at::Tensor& touched() const { return touched_; }

  // A backward writes to the gradient of a parameter.
  void touch(int64_t number);

  // The gradient of a parameter has come, on any thread. Does not need the GIL.
  void arrive(int64_t number);

  // Count in the backward that this thread runs, and tell of full buckets: the listener, or `run`
  // where there is one.
  void count_in_this_backward(bool tell_full, std::shared_ptr<ReducerRun> run);

  // Compiled autograd takes in a backward in which the parameter has a gradient. Needs the GIL.
  void capture(int64_t number);

  // Wait for the gradients of the next backward.
  void reset();

  // Call the listener no more.
  void close();

  // The parameters that have no gradient yet.
  std::vector<int64_t> missing() const;

  // The order in which gradients came, since it was taken last.
  std::vector<int64_t> take_order();
  void stop_noting_order();

 private:
  enum class Event { kCounted, kEnter, kFull, kAgain };
  struct Counted {
    Event event;
    int64_t bucket;
    std::shared_ptr<ReducerRun> run;  // of a bucket that is full
  };
  Counted count(int64_t number, bool entered);
  void reset_locked();
  // Calls a method of the listener; false where there is none any more.
  template <typename... Arguments>
  bool call(const char* method, Arguments... arguments) const;
  void full(int64_t bucket, ReducerRun* run) const;

  mutable std::mutex mutex_;  // never held while Python runs
  std::shared_ptr<const PyRef> listener_;
  const int64_t parameter_count_;
  const at::Tensor touched_;
  std::vector<int64_t> bucket_of_;
  std::vector<int64_t> bucket_sizes_;
  std::vector<int64_t> pending_;  // gradients to come in each bucket
  std::vector<char> arrived_;     // whether each parameter has one
  int task_;                      // the autograd engine's number of the backward
  bool tell_full_ = false;
  std::shared_ptr<ReducerRun> run_;
  int captured_task_;  // the engine's number of the last backward that was captured
  bool note_order_ = true;
  std::vector<int64_t> order_;
};

}  // namespace commhook
