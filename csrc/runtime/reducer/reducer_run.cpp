#include "runtime/reducer/reducer_run.h"

#include <algorithm>
#include <chrono>

#include "runtime/python/waiting.h"

namespace commhook {

ReducerRun::ReducerRun(std::shared_ptr<const CppHook> hook,
                       std::vector<std::shared_ptr<ReducerBucket>> buckets,
                       std::vector<ProcessGroupPtr> groups)
    : hook_(std::move(hook)),
      buckets_(std::move(buckets)),
      groups_(std::move(groups)),
      full_(buckets_.size()),
      late_(buckets_.size()),
      runs_(buckets_.size()) {
  TORCH_CHECK_VALUE(groups_.size() == buckets_.size(), "ReducerRun: there are ", buckets_.size(),
                    " buckets, got ", groups_.size(), " groups");
}

void ReducerRun::full(int64_t bucket) {
  std::unique_lock lock(mutex_);
  full_.at(bucket) = true;
  if (starting_) {
    return;  // another thread starts it
  }
  starting_ = true;
  while (next_ < full_.size() && full_[next_]) {
    const auto index = next_++;
    const bool is_late = late_[index];
    lock.unlock();
    start(index, is_late);
    lock.lock();
  }
  starting_ = false;
}

void ReducerRun::start(size_t index, bool is_late) {
  auto& source = *buckets_[index];
  source.take_gradients(std::nullopt, is_late);
  std::optional<CppRun> run;
  if (source.is_sparse()) {
    const auto gradients = source.gradients();
    TORCH_CHECK_TYPE(!gradients.empty() && gradients.front().is_sparse(),
                     "the gradient must be sparse");
    GradBucket bucket(index, buckets_.size(), source.parameters(), gradients.front(),
                      groups_[index]);
    run = hook_->start(bucket);
  } else {
    GradBucket bucket(index, buckets_.size(), source, groups_[index]);
    run = hook_->start(bucket);
  }
  source.drop_gradients();
  const std::lock_guard lock(mutex_);
  runs_[index] = std::move(run);
}

int64_t ReducerRun::started() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(next_);
}

std::vector<at::Tensor> ReducerRun::finish(const std::vector<int64_t>& late, double seconds) {
  {
    const std::lock_guard lock(mutex_);
    for (const auto index : late) {
      late_.at(index) = true;
    }
  }
  for (auto index = started(); index < static_cast<int64_t>(buckets_.size()); ++index) {
    full(index);
  }
  std::vector<at::Tensor> results;
  for (size_t index = 0; index < buckets_.size(); ++index) {
    const auto& run = *runs_[index];
    wait_for_result(*run.future, run.spec.where, seconds);
    run.future->wait();  // the Future of a device completes before the device does
    const auto result = run.result();
    if (std::find(late.begin(), late.end(), static_cast<int64_t>(index)) == late.end()) {
      buckets_[index]->write(result);
    } else {
      results.push_back(result);
    }
  }
  return results;
}

void ReducerRun::drain(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  for (const auto& run : runs_) {
    if (run) {
      const std::chrono::duration<double> left = deadline - Clock::now();
      wait_for(*run->future, std::max(left.count(), 0.0));
    }
  }
}

std::vector<std::optional<int64_t>> ReducerRun::bytes_sent() const {
  std::vector<std::optional<int64_t>> bytes;
  for (const auto& run : runs_) {
    bytes.push_back(run ? run->bytes_sent : std::nullopt);
  }
  return bytes;
}

}  // namespace commhook
