#include "runtime/ddp_hook.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "ops/bucket_dtype.h"
#include "runtime/grad_bucket.h"
#include "runtime/hook_names.h"
#include "runtime/hook_runner.h"
#include "runtime/unflatten.h"

namespace py = pybind11;
using c10::ivalue::Future;

namespace commhook {
namespace {

// What PyTorch makes of an exception in a Python callback of a Future is a text that names neither
// hook nor bucket. (Its type is std::runtime_error up to torch 2.13 and c10::Error later.)
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

// A tensor permuted so that its row-major order is the order of `like` in memory, which is that of
// a bucket.
at::Tensor in_memory_order(const at::Tensor& tensor, const at::Tensor& like) {
  if (like.is_contiguous() || !like.is_non_overlapping_and_dense()) {
    return tensor;
  }
  std::vector<int64_t> order(like.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::pair(like.stride(a), like.size(a)) > std::pair(like.stride(b), like.size(b));
  });
  return tensor.permute(order);
}

// A bucket's result into its parameters' gradients, which backward() has made.
void write_gradients(const at::Tensor& result, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      gradient = at::empty_like(parameter);
    }
    gradients.push_back(in_memory_order(gradient, parameter));
  }
  unflatten_into(result, gradients);
}

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.scalar_type() == b.scalar_type() &&
         a.numel() == b.numel();
}

}  // namespace

bool DdpHook::begins_backward(int64_t index, const at::Tensor& parameter) const {
  // Within one backward a parameter comes once, and buckets come in order, though with the index 0
  // for each in the first step of a static graph.
  return (index == 0 && last_index_ != 0) ||
         std::find(begun_.begin(), begun_.end(), parameter.unsafeGetTensorImpl()) != begun_.end();
}

void DdpHook::choose_delivery() {
  const auto chosen = choose_delivery_.get()().cast<std::string>();
  delivery_ = chosen == "write"    ? Delivery::kWrite
              : chosen == "buffer" ? Delivery::kBuffer
                                   : Delivery::kReducer;
  if (delivery_ == Delivery::kWrite) {
    reducer_.set_optimizer_in_backward();  // what it does: the reducer leaves the gradients alone
  }
}

c10::intrusive_ptr<Future> DdpHook::start(c10d::GradBucket& bucket, Running& running, bool first) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  auto& before = parameters_[index];
  const auto& now = running.parameters;
  const bool rebuilt =
      !std::equal(before.begin(), before.end(), now.begin(), now.end(),
                  [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  before = now;
  py::gil_scoped_acquire gil;
  try {
    if (!delivery_) {
      choose_delivery();
    }
    const py::tuple ran = runner_.get()(bucket, first, rebuilt);
    ResultSpec spec(hook_on_bucket(ran[0].cast<std::string>(), index, bucket_count(bucket)),
                    bucket.getBuffer());
    spec.dtype = ran[2].cast<at::ScalarType>();
    const py::object future = as_future(ran[1], spec.where);
    running.spec.emplace(std::move(spec));
    return future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  } catch (py::error_already_set& error) {
    running.failure = persistent(error);
  } catch (const std::exception&) {
    running.failure = std::current_exception();
  }
  parameters_.erase(index);  // the runner may not have seen the bucket
  return nullptr;
}

c10::intrusive_ptr<Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  auto running = std::make_shared<Running>();
  running->parameters = bucket.getParameters();
  running->buffer = bucket.getBuffer();
  const bool first = begins_backward(index, running->parameters.at(0));
  if (first) {
    running_.clear();
    begun_.clear();
    failure_ = nullptr;
  }
  last_index_ = index;
  for (const auto& parameter : running->parameters) {
    begun_.push_back(parameter.unsafeGetTensorImpl());
  }
  const int64_t number = ++next_number_;
  running_.emplace(number, running);
  // DDP calls its hook from Python for the gradients of zeros of a rank that has run out of inputs
  // (join). Nobody takes the results then, and only the Future can tell what failed.
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  c10::intrusive_ptr<Future> future;
  if (failure_) {
    running->failure = failure_;
  } else {
    future = start(bucket, *running, first);
    failure_ = running->failure;
  }
  // parseHookResult is given a value and no bucket, so the value takes the number along. What the
  // reducer gets never fails: it would stop waiting for the other buckets, whose collectives could
  // then write into the next step's gradients.
  if (future == nullptr) {
    running->future = c10::make_intrusive<Future>(c10::AnyType::get());
    if (!in_backward) {
      running->future->markCompleted();
      wait_for_all();
      std::rethrow_exception(running->failure);
    }
    running->future->markCompleted(c10::ivalue::Tuple::create({c10::IValue(number), {}}));
    return running->future;
  }
  // The callback holds no Python object and needs no GIL.
  running->future = future->then(
      [number, in_backward, spec = *running->spec, running = std::weak_ptr<Running>(running)](
          Future& done) -> std::tuple<c10::IValue, std::vector<Future::WeakStorage>> {
        if (!in_backward) {
          if (done.hasError()) {
            std::rethrow_exception(named(spec.where, done.exception_ptr()));
          }
          check_result(tensor_in(done.value(), spec.where), spec);
        }
        if (done.hasError()) {
          if (const auto failed = running.lock()) {
            failed->failure = named(spec.where, done.exception_ptr());
          }
          return {c10::ivalue::Tuple::create({c10::IValue(number), {}}), {}};
        }
        return {c10::ivalue::Tuple::create({c10::IValue(number), done.value()}), done.storages()};
      },
      c10::AnyType::get());
  return running->future;
}

at::Tensor DdpHook::parseHookResult(const c10::IValue& result) {
  const auto& elements = result.toTupleRef().elements();
  const auto running = running_.at(elements[0].toInt());
  try {
    if (running->failure) {
      std::rethrow_exception(running->failure);
    }
    const auto& spec = *running->spec;
    return deliver(*running, check_result(tensor_in(elements[1], spec.where), spec));
  } catch (...) {
    wait_for_all();  // since the reducer will wait for no other bucket now
    throw;
  }
}

void DdpHook::wait_for_all() const {
  // What completes them may be in Python.
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) {
    no_gil.emplace();
  }
  for (const auto& running : running_) {
    running.second->future->wait();
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
  unflatten_into(result.is_alias_of(buffer) ? result.clone() : result, {buffer});
  return buffer;
}

void register_ddp_hook(c10d::Reducer& reducer, py::object runner, py::object choose_delivery) {
  reducer.register_comm_hook(
      std::make_unique<DdpHook>(reducer, std::move(runner), std::move(choose_delivery)));
}

}  // namespace commhook
