// A method that a Python class defines for C++, as that class holds it: Python's own calls of it
// pass where those of C++ do.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "runtime/process_group/py_override.h"

namespace commhook {

// What stands for the object of such a method.
struct OverrideTarget {
  const void* self = nullptr;  // in C++, as call_override knows it; null where there is none yet
  bool hooked = false;         // whether calls go through run_with_hooks
};
using FindTarget = OverrideTarget (*)(PyObject* object);
// What is returned to Python for what the function has returned; may throw.
using ConvertResult = pybind11::object (*)(pybind11::object result);

// The object in C++ of a Python object, whose class T is bound; null before its constructor has
// run. Needs the GIL.
template <typename T>
T* cpp_object(PyObject* object) {
  static auto* const type = pybind11::detail::get_type_info(typeid(T));
  if (!PyObject_TypeCheck(object, type->type)) {
    return nullptr;
  }
  auto* const instance = reinterpret_cast<pybind11::detail::instance*>(object);
  // With one class of C++ among its bases it has one place, which needs no search.
  auto holder = instance->get_value_and_holder(instance->simple_layout ? nullptr : type);
  return holder.holder_constructed() ? static_cast<T*>(holder.value_ptr()) : nullptr;
}

// A descriptor that calls `function`. Inside, a call of the same method of the same object, as
// super() makes it, is meant for C++. Needs the GIL.
pybind11::object override_method(const pybind11::function& function, const PyMethod& method,
                                 FindTarget find, ConvertResult convert);
bool is_override_method(PyObject* attribute);

// How a method of an object with hooks is called:
// run(object, name, function, arguments with the object, keywords). Set once, from Python.
void set_run_with_hooks(pybind11::object run);
pybind11::object run_with_hooks(const pybind11::handle& object, const PyMethod& method,
                                const pybind11::object& function, const pybind11::tuple& arguments,
                                const pybind11::dict& keywords);

}  // namespace commhook
