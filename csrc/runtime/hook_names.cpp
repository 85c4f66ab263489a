#include "runtime/hook_names.h"

#include <c10/util/StringUtil.h>

namespace py = pybind11;

namespace commhook {
namespace {

// A string attribute, or "" where there is none.
std::string text_attribute(const py::handle& object, const char* name) {
  py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object.ptr(), name));
  if (!value) {
    PyErr_Clear();
    return "";
  }
  return py::isinstance<py::str>(value) ? value.cast<std::string>() : "";
}

std::string qualified(const std::string& module, const std::string& name) {
  return module.empty() || module == "builtins" ? name : module + "." + name;
}

}  // namespace

std::string hook_name(const py::handle& hook) {
  try {
    const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(hook.ptr())));
    const auto type_module = text_attribute(type, "__module__");
    if (type_module == "functools" && py::hasattr(hook, "func")) {
      const py::object inner = hook.attr("func");
      // Python flattens partials of partials; one that was made to hold another could hold itself.
      const bool nested = Py_TYPE(inner.ptr()) == Py_TYPE(hook.ptr());
      return "partial of " + (nested ? "a partial" : hook_name(inner));
    }
    if (type_module.rfind("torch_commhook.hooks", 0) == 0) {
      return py::str(hook).cast<std::string>();  // these print as they are written
    }
    const auto own = text_attribute(hook, "__qualname__");
    if (!own.empty()) {
      return qualified(text_attribute(hook, "__module__"), own);
    }
    return qualified(type_module, text_attribute(type, "__qualname__")) + " object";
  } catch (const std::exception&) {
    return "<unknown>";
  }
}

std::string bucket_name(int64_t index, int64_t count) {
  return c10::str("bucket ", index, " of ", count);
}

std::string hook_on_bucket(const std::string& hook, int64_t index, int64_t count) {
  return c10::str("hook '", hook, "' on ", bucket_name(index, count));
}

std::string type_name(const py::handle& value) {
  if (!value || value.is_none()) {
    return "None";
  }
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())));
  return qualified(text_attribute(type, "__module__"), text_attribute(type, "__qualname__"));
}

}  // namespace commhook
