#include "runtime/process_group/py_override.h"

#include <pybind11/chrono.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "runtime/process_group/override_method.h"
#include "runtime/process_group/py_work.h"
#include "runtime/python/hook_names.h"

namespace py = pybind11;

namespace commhook {
namespace {

thread_local detail::ActiveOverride* active = nullptr;

// Whether a class attribute is only a binding of C++.
bool is_native(PyObject* attribute) {
  if (PyInstanceMethod_Check(attribute) || PyCFunction_Check(attribute)) {
    return true;
  }
  if (!PyObject_TypeCheck(attribute, &PyProperty_Type)) {
    return false;
  }
  const auto getter = py::reinterpret_steal<py::object>(PyObject_GetAttrString(attribute, "fget"));
  if (!getter) {
    PyErr_Clear();
    return false;
  }
  return is_native(getter.ptr());
}

[[noreturn]] void refuse(const MethodOf& method, const char* expected, const py::handle& value) {
  TORCH_CHECK_TYPE(false, method.name(), ": must return ", expected, ", got ", type_name(value));
}

int64_t integer(const py::object& value, const MethodOf& method) {
  int overflow = 0;
  if (PyBool_Check(value.ptr()) || !PyLong_Check(value.ptr())) {
    refuse(method, "an int", value);
  }
  const auto number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  TORCH_CHECK_VALUE(overflow == 0, method.name(),
                    ": must return an int of 64 bits, got a larger one");
  return number;
}

}  // namespace

namespace detail {

ActiveOverride::ActiveOverride(const void* self, const PyMethod& method)
    : self_(self), method_(&method), outer_(active) {
  active = this;
}

ActiveOverride::~ActiveOverride() { active = outer_; }

bool ActiveOverride::exists(const void* self, const PyMethod& method) {
  for (const auto* each = active; each != nullptr; each = each->outer_) {
    if (each->self_ == self && each->method_ == &method) {
      return true;
    }
  }
  return false;
}

bool marks_itself(PyObject* attribute) { return is_override_method(attribute); }

}  // namespace detail

PyMethod::Found PyMethod::find(const py::handle& self) const {
  if (keys_.empty()) {
    std::vector<PyObject*> keys;
    for (const char* name : names_) {
      keys.push_back(PyUnicode_InternFromString(name));
    }
    keys_.swap(keys);
  }
  PyTypeObject* const type = Py_TYPE(self.ptr());
  Found found;
  for (PyObject* const key : keys_) {
    PyObject* const attribute = _PyType_Lookup(type, key);  // borrowed
    if (attribute == nullptr || is_native(attribute)) {
      continue;
    }
    if (found.name != nullptr) {
      return find_in_order(type);
    }
    found = {key, attribute};
  }
  return found;
}

// Of several overrides, the most derived class wins, and in one class the newest name.
PyMethod::Found PyMethod::find_in_order(PyTypeObject* type) const {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    const auto attributes = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(base), "__dict__"));
    for (PyObject* const key : keys_) {
      const auto attribute =
          py::reinterpret_steal<py::object>(PyObject_GetItem(attributes.ptr(), key));
      if (!attribute) {
        PyErr_Clear();
      } else if (!is_native(attribute.ptr())) {
        return {key, attribute.ptr()};  // the class owns it
      }
    }
  }
  return {};
}

std::exception_ptr persistent_exception(const py::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  py::error_already_set error;
  return persistent(error);
}

std::string MethodOf::name() const {
  PyObject* const key = method.find(self).name;
  return type_name(self) + "." +
         (key == nullptr ? method.names().front() : py::str(key).cast<std::string>());
}

template <>
void Returned<void>::from(const py::object& value, const MethodOf& method) {
  if (!value.is_none()) {
    refuse(method, "None", value);
  }
}

template <>
bool Returned<bool>::from(const py::object& value, const MethodOf& method) {
  if (!PyBool_Check(value.ptr())) {
    refuse(method, "a bool", value);
  }
  return value.is(py::handle(Py_True));
}

template <>
int Returned<int>::from(const py::object& value, const MethodOf& method) {
  const auto number = integer(value, method);
  TORCH_CHECK_VALUE(number == static_cast<int>(number), method.name(),
                    ": must return an int of 32 bits, got ", number);
  return static_cast<int>(number);
}

template <>
uint64_t Returned<uint64_t>::from(const py::object& value, const MethodOf& method) {
  const auto number = integer(value, method);
  TORCH_CHECK_VALUE(number >= 0, method.name(), ": must return an int of at least 0, got ", number);
  return static_cast<uint64_t>(number);
}

template <>
float Returned<float>::from(const py::object& value, const MethodOf& method) {
  if (PyFloat_Check(value.ptr())) {
    return static_cast<float>(PyFloat_AS_DOUBLE(value.ptr()));
  }
  if (PyBool_Check(value.ptr()) || !PyLong_Check(value.ptr())) {
    refuse(method, "a float", value);
  }
  return static_cast<float>(integer(value, method));
}

template <>
std::string Returned<std::string>::from(const py::object& value, const MethodOf& method) {
  Py_ssize_t size = 0;
  const char* const text =
      PyUnicode_Check(value.ptr()) ? PyUnicode_AsUTF8AndSize(value.ptr(), &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    refuse(method, "a str", value);
  }
  return {text, static_cast<size_t>(size)};
}

template <>
std::chrono::milliseconds Returned<std::chrono::milliseconds>::from(const py::object& value,
                                                                    const MethodOf& method) {
  if (!py::isinstance(value, py::module_::import("datetime").attr("timedelta"))) {
    refuse(method, "a datetime.timedelta", value);
  }
  return value.cast<std::chrono::milliseconds>();
}

template <>
std::vector<at::Tensor> Returned<std::vector<at::Tensor>>::from(const py::object& value,
                                                                const MethodOf& method) {
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) {
    refuse(method, "a list of tensors", value);
  }
  std::vector<at::Tensor> tensors;
  for (const auto& element : py::reinterpret_borrow<py::sequence>(value)) {
    TORCH_CHECK_TYPE(THPVariable_Check(element.ptr()), method.name(),
                     ": must return a list of tensors, got one with ", type_name(element));
    tensors.push_back(THPVariable_Unpack(element.ptr()));
  }
  return tensors;
}

template <>
std::exception_ptr Returned<std::exception_ptr>::from(const py::object& value,
                                                      const MethodOf& method) {
  if (value.is_none()) {
    return nullptr;
  }
  if (!PyExceptionInstance_Check(value.ptr())) {
    refuse(method, "an exception or None", value);
  }
  return persistent_exception(value);
}

template <>
c10::intrusive_ptr<c10::ivalue::Future> Returned<c10::intrusive_ptr<c10::ivalue::Future>>::from(
    const py::object& value, const MethodOf& method) {
  if (!py::isinstance<torch::jit::PythonFutureWrapper>(value)) {
    refuse(method, "a torch.futures.Future", value);
  }
  return value.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
}

template <>
c10::intrusive_ptr<c10d::Work> Returned<c10::intrusive_ptr<c10d::Work>>::from(
    const py::object& value, const MethodOf& method) {
  py::detail::make_caster<c10::intrusive_ptr<c10d::Work>> work;
  if (!value.is_none() && work.load(value, /*convert=*/false)) {
    return held_work(static_cast<c10::intrusive_ptr<c10d::Work>&>(work), value);
  }
  if (!py::isinstance<torch::jit::PythonFutureWrapper>(value)) {
    refuse(method, "a torch.distributed.Work or a torch.futures.Future", value);
  }
  return work_of(value.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut);
}

template <>
c10::intrusive_ptr<c10d::ProcessGroup> Returned<c10::intrusive_ptr<c10d::ProcessGroup>>::from(
    const py::object& value, const MethodOf& method) {
  if (!py::isinstance<c10d::ProcessGroup>(value)) {
    refuse(method, "a torch.distributed.ProcessGroup", value);
  }
  return value.cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
}

#if COMMHOOK_TORCH_AT_LEAST(2, 14)
template <>
c10::intrusive_ptr<c10d::Window> Returned<c10::intrusive_ptr<c10d::Window>>::from(
    const py::object& value, const MethodOf& method) {
  if (!py::isinstance<c10d::Window>(value)) {
    refuse(method, "a torch.distributed Window", value);
  }
  return value.cast<c10::intrusive_ptr<c10d::Window>>();
}
#endif

}  // namespace commhook
