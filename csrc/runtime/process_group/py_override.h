// Methods of C++ classes that a Python subclass may define: finding them, calling them on any
// thread, and checking what they return.
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

// A method by all its names in Python, the newest first: where a class has several of them, that
// one is called. An object of static storage.
class PyMethod {
 public:
  PyMethod(std::initializer_list<const char*> names) : names_(names) {}

  const std::vector<const char*>& names() const { return names_; }

  // What an object's class defines in Python; nothing where there is only what C++ has bound. Needs
  // the GIL.
  struct Found {
    PyObject* name = nullptr;       // a borrowed reference that stays
    PyObject* attribute = nullptr;  // borrowed from the class
  };
  Found find(const pybind11::handle& self) const;

 private:
  Found find_in_order(PyTypeObject* type) const;

  const std::vector<const char*> names_;
  mutable std::vector<PyObject*> keys_;  // interned, and never dropped
};

// The Python object of an object in C++ whose class is bound as T; null where it is gone. Needs the
// GIL.
template <typename T>
pybind11::object python_object_of(const T& object) {
  static const auto* const type = pybind11::detail::get_type_info(typeid(T));
  return pybind11::reinterpret_borrow<pybind11::object>(
      pybind11::detail::get_object_handle(&object, type));
}

// An exception object of Python in a form that any thread may hold. Needs the GIL.
std::exception_ptr persistent_exception(const pybind11::object& exception);

// A method of an object, for errors.
struct MethodOf {
  const pybind11::handle& self;
  const PyMethod& method;
  std::string name() const;  // "Group.allreduce". Needs the GIL
};

// What a method returned, as C++ needs it. Throws TypeError or ValueError, whose message names the
// method. Needs the GIL.
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

// Stands for a Python method that this thread is in the midst of: calling it again from there, as
// super() does, is meant for C++.
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

// Calls what the class defines under a name, or takes its value where that is a property.
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

// Calls a method of the Python object of `self`, which python() gives, or fallback() where there is
// none or its class does not define the method. On any thread, with or without the GIL. What Python
// raises comes out as it is, in a form that can be held without the GIL.
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
