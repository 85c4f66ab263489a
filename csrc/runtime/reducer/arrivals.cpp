#include "runtime/reducer/arrivals.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "runtime/hooks/hook_result.h"

namespace py = pybind11;

namespace commhook {
namespace {

constexpr int kNoTask = -2;  // -1 is the engine's number outside of backward

at::Tensor zeros_of_bytes(int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "Arrivals: parameter_count must not be negative, got ", count);
  // So that code outside of inference mode can write to it.
  const c10::InferenceMode outside(false);
  return at::zeros({count}, at::kByte);
}

}  // namespace

Arrivals::Arrivals(py::object listener, int64_t parameter_count)
    : listener_(std::make_shared<const PyRef>(std::move(listener))),
      parameter_count_(parameter_count),
      touched_(zeros_of_bytes(parameter_count)),
      captured_task_(kNoTask) {
  assign(std::vector<int64_t>(parameter_count));
}

void Arrivals::assign(std::vector<int64_t> bucket_of) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(static_cast<int64_t>(bucket_of.size()) == parameter_count_,
                    "Arrivals: bucket_of must have one entry for each of ", parameter_count_,
                    " parameters, got ", bucket_of.size());
  std::vector<int64_t> sizes(bucket_of.size());
  for (const auto bucket : bucket_of) {
    TORCH_CHECK_VALUE(bucket >= 0 && bucket < parameter_count_,
                      "Arrivals: buckets must be numbered from 0 on, got ", bucket);
    ++sizes[bucket];
  }
  bucket_of_ = std::move(bucket_of);
  bucket_sizes_ = std::move(sizes);
  reset_locked();
}

void Arrivals::touch(int64_t number) {
  const std::lock_guard lock(mutex_);
  touched_.mutable_data_ptr<uint8_t>()[number] = 1;
}

Arrivals::Counted Arrivals::count(int64_t number, bool entered) {
  const std::lock_guard lock(mutex_);
  if (!listener_) {
    return {Event::kCounted, 0, nullptr};
  }
  if (!entered && torch::autograd::get_current_graph_task_id() != task_) {
    return {Event::kEnter, 0, nullptr};
  }
  const int64_t bucket = bucket_of_[number];
  int64_t& pending = pending_[bucket];
  if (note_order_) {
    order_.push_back(number);
  }
  const bool again = arrived_[number];
  if (!again) {
    arrived_[number] = true;
    --pending;
  }
  if (pending > 0 || !tell_full_) {
    return {Event::kCounted, bucket, nullptr};
  }
  if (again) {
    return {Event::kAgain, bucket, nullptr};
  }
  return {Event::kFull, bucket, run_};
}

void Arrivals::arrive(int64_t number) {
  Counted counted = count(number, false);
  if (counted.event == Event::kEnter) {
    call("enter_backward");
    counted = count(number, true);
  }
  if (counted.event == Event::kFull) {
    full(counted.bucket, counted.run.get());
  } else if (counted.event == Event::kAgain) {
    call("came_again", number);
  }
}

void Arrivals::full(int64_t bucket, ReducerRun* run) const {
  if (run == nullptr) {
    call("bucket_full", bucket);
    return;
  }
  std::exception_ptr failure;
  try {
    run->full(bucket);
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    py::gil_scoped_acquire gil;
    if (!call("start_failed", python_exception(failure))) {
      std::rethrow_exception(failure);
    }
  }
}

template <typename... Arguments>
bool Arrivals::call(const char* method, Arguments... arguments) const {
  py::gil_scoped_acquire gil;
  std::shared_ptr<const PyRef> listener;
  {
    const std::lock_guard lock(mutex_);
    listener = listener_;
  }
  if (!listener) {
    return false;
  }
  try {
    listener->get().attr(method)(arguments...);
    return true;
  } catch (py::error_already_set& error) {
    std::rethrow_exception(persistent(error));
  }
}

void Arrivals::count_in_this_backward(bool tell_full, std::shared_ptr<ReducerRun> run) {
  const std::lock_guard lock(mutex_);
  run_.swap(run);
  task_ = torch::autograd::get_current_graph_task_id();
  tell_full_ = tell_full;
}

void Arrivals::capture(int64_t number) {
  {
    const std::lock_guard lock(mutex_);
    touched_.mutable_data_ptr<uint8_t>()[number] = 1;
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(captured_task_, task) == task) {
      return;
    }
  }
  call("before_capture");
}

void Arrivals::reset() {
  std::shared_ptr<ReducerRun> run;  // dropped after the mutex is released
  const std::lock_guard lock(mutex_);
  run_.swap(run);
  reset_locked();
}

void Arrivals::reset_locked() {
  task_ = kNoTask;
  tell_full_ = false;
  arrived_.assign(bucket_of_.size(), false);
  pending_ = bucket_sizes_;
}

void Arrivals::close() {
  std::shared_ptr<const PyRef> listener;  // dropped after the mutex is released
  const std::lock_guard lock(mutex_);
  listener.swap(listener_);
}

std::vector<int64_t> Arrivals::missing() const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> numbers;
  for (size_t number = 0; number < arrived_.size(); ++number) {
    if (!arrived_[number]) {
      numbers.push_back(static_cast<int64_t>(number));
    }
  }
  return numbers;
}

std::vector<int64_t> Arrivals::take_order() {
  const std::lock_guard lock(mutex_);
  return std::exchange(order_, {});
}

void Arrivals::stop_noting_order() {
  const std::lock_guard lock(mutex_);
  note_order_ = false;
  order_.clear();
}

}  // namespace commhook
