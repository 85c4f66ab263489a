// Python's main thread, and dropping objects there.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace commhook {

// To be called once, with the GIL.
void remember_main_thread();
bool on_main_thread();

// Drops an object on the main thread, when that runs Python next; at once where this is it. A
// thread of a backend must not be the one that drops the last reference to that backend, which
// would have to wait for the thread. With or without the GIL.
void drop_on_main_thread(pybind11::object object);

// A reference that is dropped so.
class MainThreadRef {
 public:
  explicit MainThreadRef(pybind11::object object) : object_(std::move(object)) {}
  MainThreadRef(const MainThreadRef&) = delete;
  MainThreadRef& operator=(const MainThreadRef&) = delete;
  ~MainThreadRef() { drop_on_main_thread(std::move(object_)); }

  // To be used with the GIL held.
  const pybind11::object& get() const { return object_; }

 private:
  pybind11::object object_;
};

}  // namespace commhook
