// Python's main thread, and dropping objects there.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace commhook {

// Call this once, with the GIL.
void remember_main_thread();
bool on_main_thread();

// Drops an object on the main thread, as soon as that runs Python; immediately if called there. A
// backend's thread must not drop the last reference to the backend, which would wait for that
// thread. Called with or without the GIL.
void drop_on_main_thread(pybind11::object object);

// A reference that is dropped on the main thread.
class MainThreadRef {
 public:
  explicit MainThreadRef(pybind11::object object) : object_(std::move(object)) {}
  MainThreadRef(const MainThreadRef&) = delete;
  MainThreadRef& operator=(const MainThreadRef&) = delete;
  ~MainThreadRef() { drop_on_main_thread(std::move(object_)); }

  // Use it with the GIL held.
  const pybind11::object& get() const { return object_; }

 private:
  pybind11::object object_;
};

}  // namespace commhook
