// A reference to a Python object that C++ may hold and drop on any thread, with or without the GIL,
// even after the interpreter has begun to end.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace commhook {

// Whether it is safe to take the GIL. A thread that requests it while the interpreter ends hangs or
// is killed.
inline bool interpreter_is_running() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// Whether this thread holds the GIL. After the interpreter has ended, PyGILState_Check alone
// returns true on every thread; the engine's threads and thread-local queues still exist then.
inline bool gil_is_held() {
  return PyGILState_GetThisThreadState() != nullptr && PyGILState_Check();
}

class PyRef {
 public:
  explicit PyRef(pybind11::object object) : object_(std::move(object)) {}
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;

  ~PyRef() {
    if (gil_is_held()) {
      object_ = pybind11::object();
    } else if (interpreter_is_running()) {
      pybind11::gil_scoped_acquire gil;
      object_ = pybind11::object();
    } else {
      object_.release();  // left until the process ends
    }
  }

  // Use it with the GIL held.
  const pybind11::object& get() const { return object_; }

 private:
  pybind11::object object_;
};

}  // namespace commhook
