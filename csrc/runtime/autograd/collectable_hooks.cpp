#include "runtime/autograd/collectable_hooks.h"

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "runtime/python/py_ref.h"

// These classes are in PyTorch's headers, and their members in libtorch_python, which keeps them to
// itself. What is needed of them here is what they are and the dict that they hold, so that they
// are defined again, for this library alone; nobody makes an object of them as they are. PyTorch
// knows ours by their type's name (docs/torch_versions.md).
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
