#include "runtime/autograd/collectable_hooks.h"

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "runtime/python/py_ref.h"

// PyTorch's headers declare these classes, but libtorch_python does not export their members. This
// library needs only the types and their dict, so it defines them again for itself; it makes no
// object of exactly these types. PyTorch recognises the derived types by name
// (docs/torch_versions.md).
namespace torch::autograd {
namespace {

void drop(PyObject* dict) {
  if (commhook::interpreter_is_running()) {
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(dict);
  }
}

}  // namespace

PyFunctionTensorPreHook::PyFunctionTensorPreHook(PyObject* dict, size_t value_idx)
    : dict(Py_NewRef(dict)), value_idx(value_idx) {}
PyFunctionTensorPreHook::~PyFunctionTensorPreHook() { drop(dict); }
variable_list PyFunctionTensorPreHook::operator()(const variable_list& values) { return values; }
void PyFunctionTensorPreHook::compiled_args(
    torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const {}

PyFunctionPreHook::PyFunctionPreHook(PyObject* dict) : dict(Py_NewRef(dict)) {}
PyFunctionPreHook::~PyFunctionPreHook() { drop(dict); }
variable_list PyFunctionPreHook::operator()(const variable_list& values) { return values; }
void PyFunctionPreHook::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const {}

PyFunctionPostHook::PyFunctionPostHook(PyObject* dict) : dict(Py_NewRef(dict)) {}
PyFunctionPostHook::~PyFunctionPostHook() { drop(dict); }
variable_list PyFunctionPostHook::operator()(const variable_list& outputs,
                                             const variable_list& /*inputs*/) {
  return outputs;
}
void PyFunctionPostHook::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const {}

}  // namespace torch::autograd
