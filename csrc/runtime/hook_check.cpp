// What can be said of a hook before it is called.
#include <torch/csrc/utils/pybind.h>

#include "runtime/hook_names.h"
#include "runtime/hook_runner.h"

namespace py = pybind11;

namespace commhook {
namespace {

// The signature, or None where there is none to be had (some builtins).
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

std::string text_of(const py::handle& annotation) {
  return py::isinstance<py::str>(annotation) ? annotation.cast<std::string>()
                                             : py::repr(annotation).cast<std::string>();
}

bool mentions(const std::string& text, const char* word) {
  return text.find(word) != std::string::npos;
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

// Annotations are compared by name, so that strings (PEP 563) and both GradBucket classes pass.
void check_annotations(const std::string& name, const py::object& signature) {
  const py::object empty = py::module_::import("inspect").attr("Signature").attr("empty");
  const py::object any = py::module_::import("typing").attr("Any");
  py::list positional;
  for (const auto& parameter : signature.attr("parameters").attr("values")()) {
    positional.append(parameter);
  }
  if (positional.size() >= 2) {
    const py::object annotation = positional[1].attr("annotation");
    const bool stated = !annotation.is(empty) && !annotation.is(any);
    TORCH_CHECK_VALUE(!stated || mentions(text_of(annotation), "GradBucket"), "check_hook: hook '",
                      name,
                      "' must take a GradBucket as its second argument (of torch_commhook or "
                      "torch.distributed), got the annotation ",
                      text_of(annotation));
  }
  const py::object returned = signature.attr("return_annotation");
  const bool stated = !returned.is(empty) && !returned.is(any);
  TORCH_CHECK_VALUE(!stated || mentions(text_of(returned), "Tensor") ||
                        mentions(text_of(returned), "Future"),
                    "check_hook: hook '", name,
                    "' must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got the "
                    "annotation ",
                    returned.is_none() ? "None" : text_of(returned));
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
  py::object target = hook;
  if (!inspect.attr("isroutine")(hook).cast<bool>() && py::hasattr(hook, "__call__")) {
    target = hook.attr("__call__");
  }
  for (const auto& callable : {hook, target}) {
    TORCH_CHECK_TYPE(!inspect.attr("iscoroutinefunction")(callable).cast<bool>(),
                     "check_hook: hook '", name,
                     "' must return a Future or a tensor, got a coroutine function (async def), "
                     "which nothing would await");
    TORCH_CHECK_TYPE(!inspect.attr("isgeneratorfunction")(callable).cast<bool>(),
                     "check_hook: hook '", name,
                     "' must return a Future or a tensor, got a generator function (it holds a "
                     "yield)");
  }
  const py::object signature = signature_of(hook);
  if (signature.is_none()) {
    return;
  }
  check_parameters(name, signature);
  check_annotations(name, signature);
}

}  // namespace commhook
