// A C++ hook on the buckets of our reducer, in one backward: without the GIL.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/cpp_hooks/cpp_hook.h"
#include "runtime/reducer/reducer_bucket.h"

namespace commhook {

class ReducerRun {
 public:
  // One hook runs on all buckets, each over a process group of its own device.
  ReducerRun(std::shared_ptr<const CppHook> hook,
             std::vector<std::shared_ptr<ReducerBucket>> buckets,
             std::vector<ProcessGroupPtr> groups);

  // A bucket's last gradient has come, on any thread: starts the hook on those whose turn it is.
  void full(int64_t bucket);

  // How many buckets the hook has been started on, from the first.
  int64_t started() const;

  // All gradients of the backward have come. Starts the hook on the buckets that are left, waits
  // for all of them, no longer than `seconds` each, and writes the results into the gradients, but
  // for the buckets in `late`, of which it returns them. Throws TimeoutError, or what a hook failed
  // with.
  std::vector<at::Tensor> finish(const std::vector<int64_t>& late, double seconds);

  // Waits for the buckets in flight, no longer than `seconds` in all. Throws only what a signal
  // raises.
  void drain(double seconds);

  // What each bucket put on the wire, where that is known.
  std::vector<std::optional<int64_t>> bytes_sent() const;

 private:
  // `is_late`: some of its parameters have no gradient in this backward.
  void start(size_t index, bool is_late);

  const std::shared_ptr<const CppHook> hook_;
  const std::vector<std::shared_ptr<ReducerBucket>> buckets_;
  const std::vector<ProcessGroupPtr> groups_;
  mutable std::mutex mutex_;  // not held while the hook runs
  std::vector<char> full_;
  std::vector<char> late_;
  size_t next_ = 0;
  bool starting_ = false;
  std::vector<std::optional<CppRun>> runs_;
};

}  // namespace commhook
