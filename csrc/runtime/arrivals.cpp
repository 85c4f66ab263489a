#include "runtime/arrivals.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "runtime/hook_result.h"

namespace py = pybind11;
using torch::autograd::PostAccumulateGradHook;
using torch::autograd::Variable;

namespace commhook {
namespace {

constexpr int kNoTask = -2;  // -1 is the engine's, outside of backward

// Takes the place of the hook that holds a parameter's Python hooks, which it goes on to hold.
class CountingHook : public PostAccumulateGradHook {
 public:
  CountingHook(std::unique_ptr<PostAccumulateGradHook> python, PyObject* hooks,
               std::shared_ptr<Arrivals> arrivals, int64_t number)
      : python_(std::move(python)),
        hooks_(hooks),
        arrivals_(std::move(arrivals)),
        number_(number) {}

  // A hook may take this one off: nothing of it is used after a call.
  void operator()(const Variable& parameter) override {
    if (PyDict_GET_SIZE(hooks_) == 1) {  // one word, which may be read without the GIL
      const auto arrivals = arrivals_;
      arrivals->arrive(number_);
    } else {
      (*python_)(parameter);
    }
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    python_->compiled_args(args);
  }

  void apply_with_saved(Variable& parameter,
                        torch::dynamo::autograd::SwapSavedVariables& saved) override {
    python_->apply_with_saved(parameter, saved);
  }

  std::unique_ptr<PostAccumulateGradHook> take_python() { return std::move(python_); }

 private:
  std::unique_ptr<PostAccumulateGradHook> python_;
  PyObject* hooks_;  // which python_ owns
  std::shared_ptr<Arrivals> arrivals_;
  int64_t number_;
};

}  // namespace

Arrivals::Arrivals(py::object listener, std::vector<int64_t> bucket_of)
    : listener_(std::make_shared<const PyRef>(std::move(listener))),
      bucket_of_(std::move(bucket_of)) {
  for (const auto bucket : bucket_of_) {
    TORCH_CHECK_VALUE(bucket >= 0, "Arrivals: buckets must be numbered from 0 on, got ", bucket);
  }
  reset();
}

Arrivals::Event Arrivals::count(int64_t number, bool entered) {
  const std::lock_guard lock(mutex_);
  if (!listener_) {
    return Event::kCounted;
  }
  if (!entered && torch::autograd::get_current_graph_task_id() != task_) {
    return Event::kEnter;
  }
  int64_t& pending = pending_[bucket_of_[number]];
  if (note_order_) {
    order_.push_back(number);
  }
  if (arrived_[number]) {
    return pending == 0 && tell_full_ ? Event::kAgain : Event::kCounted;
  }
  arrived_[number] = true;
  --pending;
  return pending == 0 && tell_full_ ? Event::kFull : Event::kCounted;
}

void Arrivals::arrive(int64_t number) {
  TORCH_CHECK_INDEX(number >= 0 && number < static_cast<int64_t>(bucket_of_.size()),
                    "Arrivals: there is no parameter ", number);
  Event event = count(number, false);
  if (event == Event::kEnter) {
    call("enter_backward");
    event = count(number, true);
  }
  if (event == Event::kFull) {
    call("bucket_full", bucket_of_[number]);
  } else if (event == Event::kAgain) {
    call("came_again", number);
  }
}

template <typename... Arguments>
void Arrivals::call(const char* method, Arguments... arguments) const {
  py::gil_scoped_acquire gil;
  std::shared_ptr<const PyRef> listener;
  {
    const std::lock_guard lock(mutex_);
    listener = listener_;
  }
  if (!listener) {
    return;
  }
  try {
    listener->get().attr(method)(arguments...);
  } catch (py::error_already_set& error) {
    std::rethrow_exception(persistent(error));
  }
}

void Arrivals::count_in_this_backward(bool tell_full) {
  const std::lock_guard lock(mutex_);
  task_ = torch::autograd::get_current_graph_task_id();
  tell_full_ = tell_full;
}

void Arrivals::reset() {
  const std::lock_guard lock(mutex_);
  task_ = kNoTask;
  tell_full_ = false;
  arrived_.assign(bucket_of_.size(), false);
  pending_.clear();
  for (const auto bucket : bucket_of_) {
    pending_.resize(std::max(pending_.size(), static_cast<size_t>(bucket) + 1));
    ++pending_[bucket];
  }
}

void Arrivals::close() {
  std::shared_ptr<const PyRef> listener;  // dropped without the mutex
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

void count_arrivals(const at::Tensor& parameter, const py::dict& hooks,
                    std::shared_ptr<Arrivals> arrivals, int64_t number) {
  auto& held = torch::autograd::impl::post_acc_grad_hooks(parameter);
  TORCH_CHECK(held, "count_arrivals: the parameter has no post-accumulate-grad hook");
  held = std::make_unique<CountingHook>(std::move(held), hooks.ptr(), std::move(arrivals), number);
}

void stop_counting(const at::Tensor& parameter) {
  auto& held = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* counting = dynamic_cast<CountingHook*>(held.get())) {
    held = counting->take_python();
  }
}

}  // namespace commhook
