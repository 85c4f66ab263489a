#include "runtime/ddp_hook.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "runtime/grad_bucket.h"
#include "runtime/hook_names.h"
#include "runtime/hook_runner.h"

namespace py = pybind11;
using c10::ivalue::Future;

namespace commhook {
namespace {

c10::intrusive_ptr<Future> failed_future(const std::exception_ptr& failure) {
  auto future = c10::make_intrusive<Future>(c10::AnyType::get());
  future->setError(failure);
  return future;
}

// The current exception in a form that any thread may hold, copy and drop without the GIL. Needs
// the GIL.
std::exception_ptr persistent(py::error_already_set& error) {
  error.restore();
  python_error persisted;
  persisted.persist();
  return std::make_exception_ptr(std::move(persisted));
}

}  // namespace

bool DdpHook::remember_parameters(const c10d::GradBucket& bucket) {
  std::vector<const c10::TensorImpl*> now;
  for (const auto& parameter : bucket.getParameters()) {
    now.push_back(parameter.unsafeGetTensorImpl());
  }
  auto& before = parameters_[static_cast<int64_t>(bucket.getIndex())];
  if (before == now) {
    return false;
  }
  before = std::move(now);
  return true;
}

c10::intrusive_ptr<Future> DdpHook::start(c10d::GradBucket& bucket) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  const bool rebuilt = remember_parameters(bucket);
  specs_.erase(index);
  py::gil_scoped_acquire gil;
  try {
    const py::tuple ran = runner_.get()(bucket, rebuilt);
    BucketSpec spec(ran[0].cast<std::string>(), index, bucket_count(bucket), bucket.getBuffer());
    spec.dtype = ran[2].cast<at::ScalarType>();
    const py::object future = as_future(ran[1], spec.name());
    specs_.emplace(index, std::move(spec));
    return future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  } catch (py::error_already_set& error) {
    failure_ = persistent(error);
  } catch (const std::exception&) {
    failure_ = std::current_exception();
  }
  return failed_future(failure_);
}

c10::intrusive_ptr<Future> DdpHook::runHook(c10d::GradBucket& bucket) {
  const auto index = static_cast<int64_t>(bucket.getIndex());
  if (index == 0) {
    failure_ = nullptr;  // the reducer launches buckets in order: a new backward
  }
  if (failure_) {
    return failed_future(failure_);
  }
  const auto future = start(bucket);
  // parseHookResult is given a value and no bucket, so the value takes the index along. The
  // callback holds no Python object and needs no GIL.
  return future->then(
      [index](Future& done) -> std::tuple<c10::IValue, std::vector<Future::WeakStorage>> {
        auto storages = done.hasError() ? std::vector<Future::WeakStorage>() : done.storages();
        return {c10::ivalue::Tuple::create({c10::IValue(index), done.value()}),
                std::move(storages)};
      },
      c10::AnyType::get());
}

at::Tensor DdpHook::parseHookResult(const c10::IValue& result) {
  const auto& elements = result.toTupleRef().elements();
  const auto& spec = specs_.at(elements[0].toInt());
  try {
    return parse_result(elements[1], spec);
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    std::rethrow_exception(persistent(error));
  }
}

}  // namespace commhook
