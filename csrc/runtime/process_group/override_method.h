// A descriptor for a Python method that overrides a C++ method, so that calls from Python follow
// the same way as calls from C++.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "runtime/process_group/py_override.h"

namespace commhook {

// The object on which such a method is called.
struct OverrideTarget {
  const void* self = nullptr;  // the C++ object, as in call_override; null if there is none yet
  bool hooked = false;         // whether calls go through run_with_hooks
};
using FindTarget = OverrideTarget (*)(PyObject* object);
// Converts the function's result for Python; may throw.
using ConvertResult = pybind11::object (*)(pybind11::object result);

// The C++ object of a Python object of bound class T; null before its constructor has run. Needs
// the GIL.
template <typename T>
T* cpp_object(PyObject* object) {
  static auto* const type = pybind11::detail::get_type_info(typeid(T));
  if (!PyObject_TypeCheck(object, type->type)) {
    return nullptr;
  }
  auto* const instance = reinterpret_cast<pybind11::detail::instance*>(object);
  // With one C++ base class there is one holder, which needs no search.
  auto holder = instance->get_value_and_holder(instance->simple_layout ? nullptr : type);
  return holder.holder_constructed() ? static_cast<T*>(holder.value_ptr()) : nullptr;
}

// A descriptor that calls `function`. Within that, a call of the same method on the same object, as
// by super(), goes to C++. Needs the GIL.
pybind11::object override_method(const pybind11::function& function, const PyMethod& method,
                                 FindTarget find, ConvertResult convert);
bool is_override_method(PyObject* attribute);

// The way to call a method of an object with hooks:
// run(object, name, function, arguments with the object, keywords). Python sets it once.
void set_run_with_hooks(pybind11::object run);
pybind11::object run_with_hooks(const pybind11::handle& object, const PyMethod& method,
                                const pybind11::object& function, const pybind11::tuple& arguments,
                                const pybind11::dict& keywords);

}  // namespace commhook
