#include "runtime/hooks/hook_runner.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "commhook/collectives.h"
#include "runtime/hooks/grad_bucket.h"
#include "runtime/python/hook_names.h"

namespace py = pybind11;
using torch::jit::PythonFutureWrapper;

namespace commhook {
namespace {

// The hook's exception stays as it is; a note tells where it was raised (Python 3.11).
void add_note(const py::error_already_set& error, const std::string& where) {
  const py::object& value = error.value();
  if (!value || !py::hasattr(value, "add_note")) {
    return;
  }
  try {
    const py::str note("raised by " + where);
    // This library's hooks call themselves with a bucket, so an exception may pass here twice.
    const py::object notes = py::getattr(value, "__notes__", py::list());
    if (!notes.attr("__contains__")(note).cast<bool>()) {
      value.attr("add_note")(note);
    }
  } catch (const py::error_already_set&) {
    // An exception class that refuses notes is still raised.
  }
}

std::string where_of(const py::object& hook, const py::object& bucket) {
  try {
    const auto [index, count] = index_and_count(bucket);
    return hook_on_bucket(hook_name(hook), index, count);
  } catch (const std::exception&) {
    // Not a bucket: the error to report is what the hook did with it.
    return "hook '" + hook_name(hook) + "' on " + type_name(bucket);
  }
}

// Runs call(), and adds a note to its exceptions.
template <typename Call>
py::object noted(const py::object& hook, const py::object& bucket, const Call& call) {
  try {
    return call();
  } catch (const py::error_already_set& error) {
    add_note(error, where_of(hook, bucket));
    throw;
  }
}

}  // namespace

std::pair<int64_t, int64_t> index_and_count(const py::object& bucket) {
  if (py::isinstance<c10d::GradBucket>(bucket)) {
    const auto& torch_bucket = bucket.cast<const c10d::GradBucket&>();
    return {static_cast<int64_t>(torch_bucket.getIndex()), bucket_count(torch_bucket)};
  }
  return {bucket.attr("index")().cast<int64_t>(), bucket.attr("bucket_count")().cast<int64_t>()};
}

py::object as_future(const py::object& returned, const std::string& where) {
  if (py::isinstance<PythonFutureWrapper>(returned)) {
    return returned;
  }
  if (THPVariable_Check(returned.ptr())) {
    py::object result = returned;
    if (py::hasattr(result, "trigger_wait")) {
      result = result.attr("wait")();  // waits for the tensor of a functional collective
    }
    return py::cast(
        std::make_shared<PythonFutureWrapper>(completedFuture(THPVariable_Unpack(result.ptr()))));
  }
  TORCH_CHECK_TYPE(false, where,
                   ": must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got ",
                   type_name(returned));
}

py::object run_hook(const py::object& hook, const py::object& state, const py::object& bucket) {
  const py::object returned = noted(hook, bucket, [&] { return hook(state, bucket); });
  if (py::isinstance<PythonFutureWrapper>(returned)) {
    return returned;  // returned early, since the name costs time
  }
  return as_future(returned, where_of(hook, bucket));
}

py::object run_average(const py::object& hook, const py::object& bucket) {
  return noted(hook, bucket, [&] { return hook.attr("average")(bucket); });
}

}  // namespace commhook
