#include "runtime/python/hook_names.h"

#include <c10/util/StringUtil.h>

namespace py = pybind11;

namespace commhook {
namespace {

// A string attribute, or "" if there is none.
std::string text_attribute(const py::handle& object, const char* name) {
  py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object.ptr(), name));
  if (!value) {
    PyErr_Clear();
    return "";
  }
  Py_ssize_t size = 0;
  const char* text =
      PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();  // not a string, or UTF-8 cannot encode it
    return "";
  }
  return {text, static_cast<size_t>(size)};
}

std::string qualified(const std::string& module, const std::string& name) {
  return module.empty() || module == "builtins" ? name : module + "." + name;
}

std::string name_within(const py::handle& hook, int depth) {
  // A partial may contain itself.
  if (depth > 4) {
    return "...";
  }
  try {
    const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(hook.ptr())));
    const auto type_module = text_attribute(type, "__module__");
    if (type_module == "functools" && py::hasattr(hook, "func")) {
      return "partial of " + name_within(hook.attr("func"), depth + 1);
    }
    if (type_module.rfind("torch_commhook.hooks", 0) == 0 ||
        type_module == "torch_commhook.autograd.registration") {
      return py::str(hook).cast<std::string>();  // prints like its expression
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

}  // namespace

std::string hook_name(const py::handle& hook) { return name_within(hook, 0); }

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
