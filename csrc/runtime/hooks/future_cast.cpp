#include "runtime/hooks/future_cast.h"

#include <tuple>

#include "runtime/hooks/hook_result.h"
#include "runtime/hooks/hook_runner.h"
#include "runtime/hooks/unflatten.h"

namespace py = pybind11;
using c10::ivalue::Future;
using torch::jit::PythonFutureWrapper;

namespace commhook {

std::shared_ptr<PythonFutureWrapper> cast_into(const py::object& returned,
                                               const py::object& destination, at::ScalarType dtype,
                                               const std::string& where) {
  const auto future = as_future(returned, where).cast<std::shared_ptr<PythonFutureWrapper>>();
  const auto tensor = destination.cast<at::Tensor>();
  ResultSpec spec(where, tensor);
  spec.dtype = dtype;
  // PyTorch's reducer accepts only a Python object. It is made here; the callback only passes it
  // on.
  const c10::IValue value = torch::jit::toIValue(destination, c10::PyObjectType::get());
  auto finish = [tensor, value, spec = std::move(spec)](Future& done) {
    const at::Tensor source = check_result(tensor_in(done.value(), spec.where), spec);
    if (tensor.layout() != at::kStrided) {
      // A sparse result has its own number of entries, so it needs a new object.
      py::gil_scoped_acquire gil;
      return std::tuple<c10::IValue, std::vector<Future::WeakStorage>>(
          torch::jit::toIValue(py::cast(source), c10::PyObjectType::get()), done.storages());
    }
    if (!is_same_memory(source, tensor)) {
      unflatten_into(source, {tensor});
    }
    std::vector<Future::WeakStorage> storages{tensor.storage().getWeakStorageImpl()};
    return std::tuple<c10::IValue, std::vector<Future::WeakStorage>>(value, std::move(storages));
  };
  py::gil_scoped_release no_gil;
  return std::make_shared<PythonFutureWrapper>(
      future->fut->then(std::move(finish), c10::PyObjectType::get()));
}

}  // namespace commhook
