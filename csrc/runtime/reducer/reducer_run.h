// Runs a C++ hook on the buckets of this library's reducer, in one backward, without the GIL.
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
  // One hook runs on all buckets; each bucket uses the process group of its device.
  ReducerRun(std::shared_ptr<const CppHook> hook,
             std::vector<std::shared_ptr<ReducerBucket>> buckets,
             std::vector<ProcessGroupPtr> groups);

  // Reports a bucket's last gradient, on any thread: starts the hook on all buckets up to the first
  // that is not full.
  void full(int64_t bucket);

  // The number of buckets, from the first, on which the hook has been started.
  int64_t started() const;

  // Called when all gradients of the backward have come. Starts the hook on the remaining buckets
  // and waits for each, at most `seconds`. Writes the results into the gradients, except for the
  // buckets in `late`: it returns their results. Throws TimeoutError, or a hook's error.
  std::vector<at::Tensor> finish(const std::vector<int64_t>& late, double seconds);

  // Waits for the buckets in flight, at most `seconds` in all. Throws only a signal's exception.
  void drain(double seconds);

  // The bytes that each bucket sent, if known.
  std::vector<std::optional<int64_t>> bytes_sent() const;

 private:
  // `is_late`: some parameters have no gradient in this backward.
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
