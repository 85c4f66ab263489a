#include "runtime/reducer/ddp_hook.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <tuple>

#include "commhook/huge_pages.h"
#include "ops/bucket/bucket_dtype.h"
#include "runtime/hooks/grad_bucket.h"
#include "runtime/hooks/hook_runner.h"
#include "runtime/hooks/named_errors.h"
#include "runtime/hooks/unflatten.h"
#include "runtime/python/hook_names.h"
#include "runtime/python/waiting.h"

namespace py = pybind11;
using c10::ivalue::Future;

namespace commhook {
namespace {

// How long to wait for buckets in flight after one has taken too long, or after Ctrl-C.
constexpr double kLateSeconds = 0.5;

// Whether an exception should end the program, as Ctrl-C's.
bool is_exit(const std::exception_ptr& error) {
  py::gil_scoped_acquire gil;
  return PyObject_IsInstance(python_exception(error).ptr(), PyExc_Exception) == 0;
}

// PyTorch turns an exception in a Future's Python callback into a text that names neither hook nor
// bucket. (Its type is std::runtime_error up to torch 2.13 and c10::Error later.)
std::exception_ptr named(const std::string& where, const std::exception_ptr& error) {
  std::string message;
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& callback_error) {
    message = callback_error.what_without_backtrace();
  } catch (const std::runtime_error& callback_error) {
    message = callback_error.what();
  } catch (...) {
  }
  if (message.find("error when running the callback") != std::string::npos) {
    return std::make_exception_ptr(std::runtime_error(where + ": " + message));
  }
  return error;
}

// Writes a bucket's result into its parameters' gradients, which backward() has allocated.
void write_gradients(const at::Tensor& result, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      gradient = at::empty_like(parameter);
    }
    gradients.push_back(BucketLayout::in_memory_order(gradient, parameter));
  }
  unflatten_into(result, gradients);
}

// PyTorch has no public access to a reducer's unused parameters.
struct ReducerAccess : c10d::Reducer {
  static at::Tensor& used(c10d::Reducer& reducer) {
    return reducer.*(&ReducerAccess::local_used_map_);
  }

  // After a failed step, the reducer would count its used parameters for the next step too. The
  // all-reduce of the map may still be in flight, so this replaces the tensor.
  static void forget_used(c10d::Reducer& reducer) {
    if (used(reducer).defined()) {
      used(reducer).zero_();
      auto& of_all_ranks = reducer.*(&ReducerAccess::local_used_map_dev_);
      of_all_ranks = at::zeros_like(of_all_ranks);  // a rank without inputs sends this in join()
      reducer.*(&ReducerAccess::local_used_map_reduced_) = false;
    }
  }

  static bool first_backward_is_open(c10d::Reducer& reducer) {
    const auto begun = reducer.*(&ReducerAccess::num_bwd_calls_);
    return begun == 0 || (begun == 1 && reducer.*(&ReducerAccess::first_autograd_hook_called_));
  }
};

}  // namespace

at::Tensor locally_used(c10d::Reducer& reducer) {
  const auto& used = ReducerAccess::used(reducer);
  TORCH_CHECK(used.defined(), "locally_used: the reducer must look for unused parameters");
  return used;
}

bool first_backward_is_open(c10d::Reducer& reducer) {
  return ReducerAccess::first_backward_is_open(reducer);
}

bool DdpHook::begins_backward(int64_t index, const at::Tensor& parameter) const {
  // In one backward each parameter comes once, and bucket indices ascend. In the first step of a
  // static graph all indices are 0.
  return (index == 0 && last_index_ != 0) ||
         std::find(begun_.begin(), begun_.end(), parameter.unsafeGetTensorImpl()) != begun_.end();
}

void DdpHook::choose_delivery() {
  const auto chosen = road_.get().attr("choose_delivery")().cast<std::string>();
  delivery_ = chosen == "write"    ? Delivery::kWrite
              : chosen == "buffer" ? Delivery::kBuffer
                                   : Delivery::kReducer;
  if (delivery_ == Delivery::kWrite) {
    reducer_.set_optimizer_in_backward();  // its effect: the reducer does not write gradients
  }
}

// Needs the GIL. A C++ hook's backward needs it only here and at its end.
void DdpHook::begin_step() {
  if (!delivery_) {
    choose_delivery();
  }
  cpp_hook_ = nullptr;
  const py::object begun = road_.get().attr("begin_step")();
  if (begun.is_none()) {
    return;
  }
  const auto [hook, cpu_group, device_group] =
      begun.cast<std::tuple<std::shared_ptr<CppHook>, ProcessGroupPtr, ProcessGroupPtr>>();
  cpp_hook_ = hook;
  cpu_group_ = cpu_group;
  device_group_ = device_group;
}

c10::intrusive_ptr<Future> DdpHook::start(c10d::GradBucket& bucket, Running& running, bool first) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  const auto& buffer = running.buffer;
  if (buffer.layout() == at::kStrided &&
      std::exchange(in_huge_pages_[index], buffer.const_data_ptr()) != buffer.const_data_ptr()) {
    preferHugePages(buffer);  // the buffer lives until DDP rebuilds its buckets
  }
  try {
    if (first) {
      py::gil_scoped_acquire gil;
      try {
        begin_step();
      } catch (py::error_already_set& error) {
        std::rethrow_exception(persistent(error));
      }
    }
    if (as_views_ && running.in_backward) {
      check_views(running, index);
    }
    return cpp_hook_ ? start_cpp(bucket, running) : start_python(bucket, running);
  } catch (py::error_already_set& error) {  // for example from a process group in Python
    py::gil_scoped_acquire gil;
    running.failure = persistent(error);
    return nullptr;
  } catch (...) {
    running.failure = std::current_exception();
    return nullptr;
  }
}

c10::intrusive_ptr<Future> DdpHook::start_cpp(c10d::GradBucket& bucket, Running& running) {
  const bool on_cpu = running.buffer.device().is_cpu();
  GradBucket own(bucket, static_cast<size_t>(bucket_count(bucket)),
                 on_cpu ? cpu_group_ : device_group_);
  running.run = cpp_hook_->start(own);
  running.spec = running.run->spec;
  return running.run->future;
}

c10::intrusive_ptr<Future> DdpHook::start_python(c10d::GradBucket& bucket, Running& running) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  auto& before = parameters_[index];
  const auto& now = running.parameters;
  const bool rebuilt =
      !std::equal(before.begin(), before.end(), now.begin(), now.end(),
                  [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  before = now;
  py::gil_scoped_acquire gil;
  try {
    const py::tuple ran = road_.get().attr("run")(bucket, rebuilt);
    ResultSpec spec(hook_on_bucket(ran[0].cast<std::string>(), index, bucket_count(bucket)),
                    bucket.getBuffer());
    spec.dtype = ran[2].cast<at::ScalarType>();
    const py::object future = as_future(ran[1], spec.where);
    if (!ran[3].is_none()) {
      running.after = std::make_unique<PyRef>(py::object(ran[3]));
    }
    running.spec.emplace(std::move(spec));
    return future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  } catch (py::error_already_set& error) {
    parameters_.erase(index);  // the listener may not have seen the bucket
    std::rethrow_exception(persistent(error));
  } catch (...) {
    parameters_.erase(index);
    throw;
  }
}

at::Tensor DdpHook::Running::result(const c10::IValue& value) const {
  return run ? run->result() : check_result(tensor_in(value, spec->where), *spec);
}

void DdpHook::Running::settle(std::exception_ptr error, c10::IValue value,
                              std::vector<Future::WeakStorage> storages) {
  if (settled.exchange(true)) {
    return;
  }
  if (error && !in_backward) {
    future->setError(std::move(error));
    return;
  }
  // The Future never fails in backward: the reducer would stop waiting for the other buckets, and
  // their collectives could then write into the next step's gradients.
  failure = std::move(error);
  future->markCompleted(c10::ivalue::Tuple::create({c10::IValue(number), std::move(value)}),
                        std::move(storages));
}

c10::intrusive_ptr<Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  auto running = std::make_shared<Running>();
  running->parameters = bucket.getParameters();
  running->buffer = bucket.getBuffer();
  // In join(), DDP calls its hook from Python with zero gradients for a rank that has run out of
  // inputs. No caller takes the results then, and only the Future can report an error.
  running->in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  const bool first = begins_backward(index, running->parameters.at(0));
  if (first) {
    running_.clear();
    begun_.clear();
    failure_ = nullptr;
    written_ = 0;
    ended_ = false;
  }
  last_index_ = index;
  for (const auto& parameter : running->parameters) {
    begun_.push_back(parameter.unsafeGetTensorImpl());
  }
  c10::intrusive_ptr<Future> future;
  if (!failure_) {
    future = start(bucket, *running, first);
    if (future == nullptr) {
      fail(running->failure, drain_seconds_);
    }
  }
  if (future == nullptr && !running->in_backward) {
    std::rethrow_exception(failure_);
  }
  // parseHookResult receives a value without its bucket, so the value includes the number.
  running->number = ++next_number_;
  running->future = future ? future->createInstance(c10::AnyType::get())
                           : c10::make_intrusive<Future>(c10::AnyType::get());
  running_.emplace(running->number, running);
  if (future == nullptr) {
    running->settle(failure_);
    return running->future;
  }
  // The callback holds no Python object and does not need the GIL.
  future->addCallback([running](Future& done) {
    const auto& where = running->spec->where;
    if (done.hasError()) {
      running->settle(running->run ? named_error(where, done.exception_ptr())
                                   : named(where, done.exception_ptr()));
      return;
    }
    if (!running->in_backward) {
      try {
        running->result(done.value());
      } catch (...) {
        running->settle(std::current_exception());
        return;
      }
    }
    running->settle(nullptr, done.value(), done.storages());
  });
  if (bucket.isLast()) {
    if (running->in_backward) {
      await(*running_.begin()->second);
    } else {
      end_shadow();
    }
  }
  return running->future;
}

// Ends the step of a rank that has run out of inputs: no caller asks for its results.
void DdpHook::end_shadow() {
  for (const auto& other : running_) {
    if (!failure_) {
      await(*other.second);
    }
    if (!failure_ && other.second->future->hasError()) {
      fail(other.second->future->exception_ptr(), drain_seconds_);
    }
  }
  if (!failure_) {
    failure_ = ended(nullptr);
  }
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

// Handles the first failure of a bucket in this backward. `late`: a bucket that has timed out.
void DdpHook::fail(const std::exception_ptr& failure, double drain_seconds, const Running* late) {
  failure_ = failure;
  try {
    give_up();
    drain(is_exit(failure) ? std::min(drain_seconds, kLateSeconds) : drain_seconds, late);
  } catch (...) {
    failure_ = std::current_exception();
  }
  failure_ = ended(failure_);
  // A Future that is not complete now may never be, and backward would wait for it.
  for (const auto& other : running_) {
    other.second->settle(failure_);
  }
}

// Prevents collectives that have not been issued yet.
void DdpHook::give_up() const {
  py::gil_scoped_acquire gil;
  try {
    road_.get().attr("give_up")(python_exception(failure_));
  } catch (py::error_already_set& error) {
    std::rethrow_exception(persistent(error));
  }
}

// Calls end_step(), and returns the error that backward() must raise.
std::exception_ptr DdpHook::ended(const std::exception_ptr& failure) {
  if (ended_) {
    return failure;
  }
  ended_ = true;
  py::gil_scoped_acquire gil;
  try {
    py::object sent = py::none();
    if (cpp_hook_ && !failure) {
      py::list buckets;
      for (const auto& other : running_) {
        const auto& buffer = other.second->buffer;
        buckets.append(
            py::make_tuple(buffer.numel(), buffer.scalar_type(), other.second->run->bytes_sent));
      }
      sent = buckets;
    }
    cpp_hook_ = nullptr;  // the hook may be removed before the next backward
    road_.get().attr("end_step")(failure ? python_exception(failure) : py::none(), sent);
  } catch (py::error_already_set& error) {
    return persistent(error);
  }
  return failure;
}

// Waits for a bucket's result, within the timeout: the reducer would wait without one. A bucket
// that times out fails.
void DdpHook::await(Running& running) {
  std::exception_ptr failure;
  try {
    if (!running.future->completed()) {  // a bucket that was not started has only a failure
      wait_for_result(*running.future, running.spec->where, timeout_seconds_);
    }
    return;
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    failure = persistent(error);
  } catch (...) {
    failure = std::current_exception();
  }
  // The other buckets have had the same time.
  fail(failure, std::min(drain_seconds_, kLateSeconds), &running);
}

at::Tensor DdpHook::parseHookResult(const c10::IValue& result) {
  const auto& elements = result.toTupleRef().elements();
  const auto current = running_.find(elements[0].toInt());
  const auto running = current->second;
  std::exception_ptr error;
  try {
    if (running->failure) {
      std::rethrow_exception(running->failure);
    }
    auto checked = running->result(elements[1]);
    if (running->after) {
      py::gil_scoped_acquire gil;
      try {
        checked = running->after->get()(checked).cast<at::Tensor>();
      } catch (py::error_already_set& raised) {
        std::rethrow_exception(persistent(raised));
      }
    }
    auto delivered = deliver(*running, checked);
    ++written_;
    if (const auto next = std::next(current); next != running_.end()) {
      await(*next->second);
    } else if (written_ == running_.size()) {
      error = ended(nullptr);
    }
    if (!error) {
      if (ended_ && !failure_) {  // otherwise other buckets must still fail
        running_.clear();         // frees the hooks in it
      }
      return delivered;
    }
  } catch (...) {
    error = std::current_exception();
  }
  // The reducer now waits for no other bucket.
  if (!failure_) {
    fail(error, drain_seconds_);
  }
  error = failure_;  // not that of a bucket whose connections were closed because of it
  // Objects that an exception holds, such as a hook's locals, must not live until the next
  // backward.
  running->failure = nullptr;
  running_.clear();
  failure_ = nullptr;
  ReducerAccess::forget_used(reducer_);
  std::rethrow_exception(error);
}

// Waits for the buckets in flight, at most so long. Throws Ctrl-C's exception.
void DdpHook::drain(double seconds, const Running* late) const {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  for (const auto& [number, running] : running_) {
    if (running.get() == late) {
      continue;
    }
    const std::chrono::duration<double> left = deadline - Clock::now();
    try {
      if (!wait_for(*running->future, std::max(left.count(), 0.0))) {
        TORCH_WARN(running->spec->where, ": its Future had not completed ", seconds,
                   " seconds after another bucket failed, so the step ends without it. If its "
                   "collective is still running, its process group cannot be used any more.");
      }
    } catch (py::error_already_set& interrupt) {
      py::gil_scoped_acquire gil;
      std::rethrow_exception(persistent(interrupt));
    }
  }
}

// If a user moves a gradient (`p.grad.data = ...`, `module.to(...)`), DDP's own view moves with it.
// DDP would then send the old contents of the bucket, and write to memory that nobody reads.
void DdpHook::check_views(const Running& running, int64_t index) const {
  if (running.buffer.layout() != at::kStrided) {
    return;
  }
  for (size_t i = 0; i < running.parameters.size(); ++i) {
    const auto& gradient = running.parameters[i].grad();
    TORCH_CHECK(
        !gradient.defined() || gradient.is_alias_of(running.buffer), "torch_commhook: gradient ", i,
        " of bucket ", index, ", of shape ", gradient.sizes(),
        ", is outside the memory of DistributedDataParallel's bucket, where "
        "gradient_as_bucket_view=True keeps it; convert the module and replace .grad before "
        "DistributedDataParallel wraps the module");
  }
}

at::Tensor DdpHook::deliver(const Running& running, const at::Tensor& result) const {
  const at::Tensor& buffer = running.buffer;
  if (buffer.layout() != at::kStrided) {
    return result;
  }
  if (delivery_ == Delivery::kWrite) {
    write_gradients(result, running.parameters);
    return buffer;
  }
  const bool same_dtype = result.scalar_type() == buffer.scalar_type();
  if (is_same_memory(result, buffer) || (delivery_ == Delivery::kReducer && same_dtype)) {
    return result;
  }
  if (!is_bucket_dtype(buffer.scalar_type())) {
    return buffer.copy_(result);
  }
  unflatten_into(result, {buffer});
  return buffer;
}

void register_ddp_hook(c10d::Reducer& reducer, py::object road, bool as_views,
                       double timeout_seconds, double drain_seconds) {
  reducer.register_comm_hook(std::make_unique<DdpHook>(reducer, std::move(road), as_views,
                                                       timeout_seconds, drain_seconds));
}

}  // namespace commhook
