#include "runtime/future_cast.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <tuple>

namespace py = pybind11;
using c10::ivalue::Future;
using torch::jit::PythonFutureWrapper;

namespace commhook {
namespace {

void cast(const at::Tensor& source, const at::Tensor& destination) {
  static const auto unflatten_into =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("commhook::unflatten_into", "")
          .typed<void(const at::Tensor&, at::TensorList, double)>();
  at::NoGradGuard no_grad;
  unflatten_into.call(source, destination, 1.0);
}

}  // namespace

std::shared_ptr<PythonFutureWrapper> cast_into(const std::shared_ptr<PythonFutureWrapper>& future,
                                               const py::object& destination) {
  const auto tensor = destination.cast<at::Tensor>();
  // PyTorch's reducer takes nothing but a Python object. Made here, it is only passed on later.
  const c10::IValue value = torch::jit::toIValue(destination, c10::PyObjectType::get());
  auto finish = [tensor, value](Future& done) {
    const c10::IValue result = done.value();
    const at::Tensor source =
        result.isTensorList() ? result.toTensorList().get(0) : result.toTensor();
    if (!source.is_same(tensor)) {
      cast(source, tensor);
    }
    std::vector<Future::WeakStorage> storages{tensor.storage().getWeakStorageImpl()};
    return std::tuple<c10::IValue, std::vector<Future::WeakStorage>>(value, std::move(storages));
  };
  py::gil_scoped_release no_gil;
  return std::make_shared<PythonFutureWrapper>(
      future->fut->then(std::move(finish), c10::PyObjectType::get()));
}

}  // namespace commhook
