#include "runtime/ddp_hook.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "runtime/grad_bucket.h"
#include "runtime/hook_names.h"
#include "runtime/hook_runner.h"
#include "runtime/unflatten.h"

namespace py = pybind11;
using c10::ivalue::Future;

namespace commhook {
namespace {

c10::intrusive_ptr<Future> failed_future(const std::exception_ptr& failure) {
  auto future = c10::make_intrusive<Future>(c10::AnyType::get());
  future->setError(failure);
  return future;
}

// What PyTorch makes of an exception in a Python callback of a Future is a text that names neither
// hook nor bucket. (Its type is std::runtime_error up to torch 2.13 and c10::Error later.)
[[noreturn]] void rethrow_with(const std::string& where, const std::exception_ptr& error) {
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
    throw std::runtime_error(where + ": " + message);
  }
  std::rethrow_exception(error);
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

}  // namespace

bool DdpHook::begins_backward(int64_t index, const at::Tensor& parameter) const {
  // Within one backward a parameter comes once, and buckets come in order, though with the index 0
  // for each in the first step of a static graph.
  return (index == 0 && last_index_ != 0) ||
         std::find(begun_.begin(), begun_.end(), parameter.unsafeGetTensorImpl()) != begun_.end();
}

c10::intrusive_ptr<Future> DdpHook::start(c10d::GradBucket& bucket,
                                          std::vector<at::Tensor> parameters, bool first) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  auto& before = parameters_[index];
  const bool rebuilt =
      !std::equal(before.begin(), before.end(), parameters.begin(), parameters.end(),
                  [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  before = parameters;
  py::gil_scoped_acquire gil;
  try {
    const py::tuple ran = runner_.get()(bucket, first, rebuilt);
    BucketSpec spec(ran[0].cast<std::string>(), index, bucket_count(bucket), bucket.getBuffer());
    spec.dtype = ran[2].cast<at::ScalarType>();
    const py::object future = as_future(ran[1], spec.name());
    running_.emplace(next_number_,
                     Running{std::move(spec), bucket.getBuffer(), std::move(parameters)});
    return future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  } catch (py::error_already_set& error) {
    failure_ = persistent(error);
  } catch (const std::exception&) {
    failure_ = std::current_exception();
  }
  parameters_.erase(index);  // the runner may not have seen the bucket
  return failed_future(failure_);
}

c10::intrusive_ptr<Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  auto parameters = bucket.getParameters();
  const bool first = begins_backward(index, parameters.at(0));
  if (first) {
    running_.clear();
    begun_.clear();
    failure_ = nullptr;
  }
  last_index_ = index;
  for (const auto& parameter : parameters) {
    begun_.push_back(parameter.unsafeGetTensorImpl());
  }
  if (failure_) {
    return failed_future(failure_);
  }
  const int64_t number = ++next_number_;
  const auto future = start(bucket, std::move(parameters), first);
  // parseHookResult is given a value and no bucket, so the value takes the number along. The
  // callback holds no Python object and needs no GIL.
  const auto running = running_.find(number);
  auto where = running == running_.end() ? std::string() : running->second.spec.name();
  return future->then(
      [number, where = std::move(where)](
          Future& done) -> std::tuple<c10::IValue, std::vector<Future::WeakStorage>> {
        if (done.hasError()) {
          rethrow_with(where, done.exception_ptr());
        }
        return {c10::ivalue::Tuple::create({c10::IValue(number), done.value()}), done.storages()};
      },
      c10::AnyType::get());
}

at::Tensor DdpHook::parseHookResult(const c10::IValue& result) {
  const auto& elements = result.toTupleRef().elements();
  const auto& [spec, buffer, parameters] = running_.at(elements[0].toInt());
  const at::Tensor tensor = check_result(tensor_in(elements[1], spec.name()), spec);
  if (delivery_ == Delivery::kReducer || buffer.layout() != at::kStrided) {
    return tensor;
  }
  if (delivery_ == Delivery::kWrite) {
    write_gradients(tensor, parameters);
  } else if (!tensor.is_alias_of(buffer)) {
    unflatten_into(tensor, {buffer});
  } else {
    return tensor;
  }
  return buffer;
}

void register_ddp_hook(c10d::Reducer& reducer, py::object runner, const std::string& delivery) {
  const auto parsed = delivery == "write"    ? DdpHook::Delivery::kWrite
                      : delivery == "buffer" ? DdpHook::Delivery::kBuffer
                                             : DdpHook::Delivery::kReducer;
  reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(runner), parsed));
  if (parsed == DdpHook::Delivery::kWrite) {
    reducer.set_optimizer_in_backward();  // what it does: the reducer leaves the gradients alone
  }
}

}  // namespace commhook
