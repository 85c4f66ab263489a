// Calls the bucket operators for Python lists and tuples of plain tensors without torch.ops.
// torch.ops converts each tensor to a value of TorchScript and drops it without the GIL, which it
// takes again for each.
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <vector>

#include "commhook/ops.h"
#include "runtime/bindings/bindings.h"

namespace py = pybind11;

namespace commhook {
namespace {

bool is_plain(py::handle value) { return THPVariable_CheckExact(value.ptr()); }

// None if a tensor overrides operators (__torch_function__).
std::optional<std::vector<at::Tensor>> plain_tensors(py::handle values) {
  const bool is_sequence = PyList_CheckExact(values.ptr()) || PyTuple_CheckExact(values.ptr());
  if (!is_sequence || at::impl::torch_function_mode_enabled()) {
    return std::nullopt;
  }
  const auto count = PySequence_Fast_GET_SIZE(values.ptr());
  std::vector<at::Tensor> tensors;
  tensors.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::handle value = PySequence_Fast_GET_ITEM(values.ptr(), i);
    if (!is_plain(value)) {
      return std::nullopt;
    }
    tensors.push_back(THPVariable_Unpack(value.ptr()));
  }
  return tensors;
}

// Calls run(tensors, scale, flat tensor). Returns false, and does nothing, if the call must go
// through torch.ops.
template <typename Run>
bool run_on_plain(py::handle values, py::handle scale, py::handle flat, const Run& run) {
  if (!PyFloat_CheckExact(scale.ptr()) || !is_plain(flat)) {
    return false;
  }
  const auto tensors = plain_tensors(values);
  if (!tensors) {
    return false;
  }
  const double factor = PyFloat_AS_DOUBLE(scale.ptr());
  at::Tensor buffer = THPVariable_Unpack(flat.ptr());
  const py::gil_scoped_release no_gil;
  run(*tensors, factor, buffer);
  return true;
}

bool flatten_plain(py::handle tensors, py::handle scale, py::handle out) {
  return run_on_plain(tensors, scale, out, ops::flatten_out);
}

bool unflatten_plain(py::handle buffer, py::handle tensors, py::handle scale) {
  return run_on_plain(tensors, scale, buffer,
                      [](at::TensorList into, double factor, const at::Tensor& source) {
                        ops::unflatten_into(source, into, factor);
                      });
}

}  // namespace

void bind_bucket(py::module_& m) {
  m.def("flatten_out", &flatten_plain, py::arg("tensors"), py::arg("scale"), py::arg("out"));
  m.def("unflatten_into", &unflatten_plain, py::arg("buffer"), py::arg("tensors"),
        py::arg("scale"));
}

}  // namespace commhook
