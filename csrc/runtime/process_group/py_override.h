// C++ methods that a Python subclass may override: finds overrides, calls them on any thread, and
// checks their results.
//
// C++ calls a virtual method. PyProcessGroup looks for a Python method by all its names
// (py_override.*), calls it with the GIL and checks its result. If code inside the method calls the
// same method of the same object, it means C++ or the next class, as super() does. A thread-local
// chain of the active methods detects this case (ActiveOverride).
//
// A call from Python would reach the method of the class directly. So for each method that C++
// knows, a class of groups or works has an object that calls the function (override_method.*,
// installed by __init_subclass__). The object joins that chain and makes a Work of a Future. If the
// group has hooks, it lets process_group/base.py call the method. Calls from C++ also go through
// this object, because C++ calls the attribute of the class. The work of backends in C++ takes the
// same path (with_hooks). So hooks run once for each operation, whoever calls it.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "runtime/hooks/hook_result.h"
#include "runtime/python/py_ref.h"
#include "runtime/python/torch_release.h"

namespace commhook {

// A method with all its Python names, the newest first; of several in one class, the newest is
// called. Must be a static object.
class PyMethod {
 public:
  PyMethod(std::initializer_list<const char*> names) : names_(names) {}

  const std::vector<const char*>& names() const { return names_; }

  // The override in an object's Python class; empty if C++ bindings alone define the method. Needs
  // the GIL.
  struct Found {
    PyObject* name = nullptr;       // borrowed from keys_, which is never freed
    PyObject* attribute = nullptr;  // borrowed from the class
  };
  Found find(const pybind11::handle& self) const;

 private:
  Found find_in_order(PyTypeObject* type) const;

  const std::vector<const char*> names_;
  mutable std::vector<PyObject*> keys_;  // interned, and never freed
};

// The Python object of a C++ object of bound class T; null if it is gone. Needs the GIL.
template <typename T>
pybind11::object python_object_of(const T& object) {
  static const auto* const type = pybind11::detail::get_type_info(typeid(T));
  return pybind11::reinterpret_borrow<pybind11::object>(
      pybind11::detail::get_object_handle(&object, type));
}

// Converts a Python exception so that any thread may hold it. Needs the GIL.
std::exception_ptr persistent_exception(const pybind11::object& exception);

// Names a method of an object in errors.
struct MethodOf {
  const pybind11::handle& self;
  const PyMethod& method;
  std::string name() const;  // for example "Group.allreduce"; needs the GIL
};

// Converts a method's return value for C++. Throws TypeError or ValueError with the method's name.
// Needs the GIL.
template <typename Result>
struct Returned {
  static Result from(const pybind11::object& value, const MethodOf& method);
};
template <>
void Returned<void>::from(const pybind11::object& value, const MethodOf& method);
template <>
bool Returned<bool>::from(const pybind11::object& value, const MethodOf& method);
template <>
int Returned<int>::from(const pybind11::object& value, const MethodOf& method);
template <>
uint64_t Returned<uint64_t>::from(const pybind11::object& value, const MethodOf& method);
template <>
float Returned<float>::from(const pybind11::object& value, const MethodOf& method);
template <>
std::string Returned<std::string>::from(const pybind11::object& value, const MethodOf& method);
template <>
std::chrono::milliseconds Returned<std::chrono::milliseconds>::from(const pybind11::object& value,
                                                                    const MethodOf& method);
template <>
std::vector<at::Tensor> Returned<std::vector<at::Tensor>>::from(const pybind11::object& value,
                                                                const MethodOf& method);
template <>
std::exception_ptr Returned<std::exception_ptr>::from(const pybind11::object& value,
                                                      const MethodOf& method);
template <>
c10::intrusive_ptr<c10::ivalue::Future> Returned<c10::intrusive_ptr<c10::ivalue::Future>>::from(
    const pybind11::object& value, const MethodOf& method);
template <>
c10::intrusive_ptr<c10d::Work> Returned<c10::intrusive_ptr<c10d::Work>>::from(
    const pybind11::object& value, const MethodOf& method);
template <>
c10::intrusive_ptr<c10d::ProcessGroup> Returned<c10::intrusive_ptr<c10d::ProcessGroup>>::from(
    const pybind11::object& value, const MethodOf& method);
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
template <>
c10::intrusive_ptr<c10d::Window> Returned<c10::intrusive_ptr<c10d::Window>>::from(
    const pybind11::object& value, const MethodOf& method);
#endif

namespace detail {

// Marks a Python override that runs on this thread: a call of the same method from inside it, as by
// super(), goes to C++.
class ActiveOverride {
 public:
  ActiveOverride(const void* self, const PyMethod& method);
  ~ActiveOverride();
  ActiveOverride(const ActiveOverride&) = delete;
  ActiveOverride& operator=(const ActiveOverride&) = delete;

  static bool exists(const void* self, const PyMethod& method);

 private:
  const void* const self_;
  const PyMethod* const method_;
  ActiveOverride* const outer_;
};

// Whether a class attribute is an override_method, which makes its own ActiveOverride.
bool marks_itself(PyObject* attribute);

// Calls the class attribute of that name, or returns its value if it is a property.
template <typename... Arguments>
pybind11::object call(const pybind11::handle& self, PyObject* name, const Arguments&... arguments) {
  const auto bound =
      pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(self.ptr(), name));
  if (!bound) {
    throw pybind11::error_already_set();
  }
  return PyCallable_Check(bound.ptr()) ? bound(arguments...) : bound;
}

}  // namespace detail

// Calls the override in the class of the Python object that python() returns. Calls fallback() if
// there is no object or no override. Runs on any thread, with or without the GIL. Python's
// exceptions pass through, in a form that can be held without the GIL.
template <typename Result, typename Python, typename Fallback, typename... Arguments>
Result call_override(const void* self, const PyMethod& method, const Python& python,
                     const Fallback& fallback, const Arguments&... arguments) {
  if (!detail::ActiveOverride::exists(self, method) && interpreter_is_running()) {
    pybind11::gil_scoped_acquire gil;
    try {
      const pybind11::object object = python();
      const auto found = object ? method.find(object) : PyMethod::Found{};
      if (found.name != nullptr) {
        std::optional<detail::ActiveOverride> active;
        if (!detail::marks_itself(found.attribute)) {
          active.emplace(self, method);
        }
        return Returned<Result>::from(detail::call(object, found.name, arguments...),
                                      {object, method});
      }
    } catch (pybind11::error_already_set& error) {
      std::rethrow_exception(persistent(error));
    }
  }
  return fallback();
}

}  // namespace commhook
