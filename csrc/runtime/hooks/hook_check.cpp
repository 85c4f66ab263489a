// Checks a hook before it is called.
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "runtime/hooks/hook_runner.h"
#include "runtime/python/hook_names.h"

namespace py = pybind11;

namespace commhook {
namespace {

// The signature, or None if there is none (some builtins).
py::object signature_of(const py::object& hook) {
  try {
    return py::module_::import("inspect").attr("signature")(hook);
  } catch (const py::error_already_set& error) {
    if (error.matches(PyExc_ValueError) || error.matches(PyExc_TypeError)) {
      return py::none();
    }
    throw;
  }
}

void check_parameters(const std::string& name, const py::object& signature) {
  try {
    signature.attr("bind")(py::none(), py::none());
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) {
      throw;
    }
    TORCH_CHECK_TYPE(false, "check_hook: hook '", name,
                     "' must be callable as hook(state, bucket), got the signature ",
                     py::str(signature).cast<std::string>());
  }
}

// The function with a hook's annotations: the one inside a partial, a method or a callable object.
py::object function_of(const py::object& hook) {
  const auto inspect = py::module_::import("inspect");
  py::object function = hook;
  if (py::isinstance(function, py::module_::import("functools").attr("partial"))) {
    // A partial's func is never a partial, unless someone sets it.
    function = function.attr("func");
  }
  return inspect.attr("isroutine")(function).cast<bool>() ? function : function.attr("__call__");
}

// Annotations with their strings resolved; without those that cannot be resolved.
py::dict annotations_of(const py::object& hook) {
  try {
    return py::module_::import("typing").attr("get_type_hints")(function_of(hook));
  } catch (const py::error_already_set&) {
    // For example a name that only a type checker knows; not a reason to refuse a hook.
    return py::dict();
  }
}

// Whether an annotation is a class that cannot hold any of `wanted`. False for everything that is
// not a plain class (a union, a protocol, a type variable).
bool excludes(const py::object& annotation, const std::vector<py::object>& wanted) {
  const auto typing = py::module_::import("typing");
  if (annotation.is(typing.attr("Any"))) {  // a class since Python 3.11
    return false;
  }
  if (!PyType_Check(annotation.ptr())) {
    const py::object origin = typing.attr("get_origin")(annotation);
    const bool is_union = origin.is(py::module_::import("types").attr("UnionType"));
    return !is_union && PyType_Check(origin.ptr()) && excludes(origin, wanted);
  }
  for (const auto& type : wanted) {
    for (const auto& pair : {std::pair(type, annotation), std::pair(annotation, type)}) {
      const int related = PyObject_IsSubclass(pair.first.ptr(), pair.second.ptr());
      if (related != 0) {
        PyErr_Clear();  // set if a class does not support the test
        return false;
      }
    }
  }
  return true;
}

void check_annotations(const std::string& name, const py::object& hook,
                       const py::object& signature) {
  const auto annotations = annotations_of(hook);
  const py::list parameters(signature.attr("parameters"));
  const auto torch = py::module_::import("torch");
  if (parameters.size() >= 2 && annotations.contains(parameters[1])) {
    const py::object annotation = annotations[parameters[1]];
    TORCH_CHECK_VALUE(
        !excludes(annotation,
                  {torch.attr("distributed").attr("GradBucket"),
                   py::module_::import("torch_commhook.buckets.grad_bucket").attr("GradBucket")}),
        "check_hook: hook '", name,
        "' must take a GradBucket as its second argument (of torch_commhook or "
        "torch.distributed), got the annotation ",
        py::repr(annotation).cast<std::string>());
  }
  if (annotations.contains("return")) {
    const py::object annotation = annotations["return"];
    TORCH_CHECK_VALUE(
        !excludes(annotation, {torch.attr("Tensor"), torch.attr("futures").attr("Future")}),
        "check_hook: hook '", name,
        "' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the "
        "annotation ",
        py::repr(annotation).cast<std::string>());
  }
}

}  // namespace

void check_hook(const py::object& hook) {
  TORCH_CHECK_TYPE(PyCallable_Check(hook.ptr()),
                   "check_hook: a hook must be callable as hook(state, bucket), got ",
                   type_name(hook));
  const auto name = hook_name(hook);
  TORCH_CHECK_TYPE(!PyType_Check(hook.ptr()), "check_hook: hook '", name,
                   "' must be an instance or a function, got the class itself; call it first");
  const auto inspect = py::module_::import("inspect");
  const py::object function = function_of(hook);
  TORCH_CHECK_TYPE(!inspect.attr("iscoroutinefunction")(function).cast<bool>(),
                   "check_hook: hook '", name,
                   "' must return a Future or a tensor, got a coroutine function (async def), "
                   "which nothing would await");
  TORCH_CHECK_TYPE(!inspect.attr("isgeneratorfunction")(function).cast<bool>(),
                   "check_hook: hook '", name,
                   "' must return a Future or a tensor, got a generator function (it holds a "
                   "yield)");
  const py::object signature = signature_of(hook);
  if (signature.is_none()) {
    return;
  }
  check_parameters(name, signature);
  check_annotations(name, hook, signature);
}

}  // namespace commhook
