#include "runtime/python/main_thread.h"

#include <mutex>
#include <vector>

#include "runtime/python/py_ref.h"

namespace py = pybind11;

namespace commhook {
namespace {

unsigned long main_thread = 0;

struct Dropped {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  bool scheduled = false;
};

Dropped& dropped() {
  static auto* const dropped = new Dropped;  // never freed: threads may drop until the process ends
  return *dropped;
}

int drop_all(void* /*unused*/) {
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(dropped().mutex);
    objects.swap(dropped().objects);
    dropped().scheduled = false;
  }
  for (PyObject* const object : objects) {
    Py_DECREF(object);
  }
  return 0;
}

}  // namespace

void remember_main_thread() {
  const auto threading = py::module_::import("threading");
  main_thread = threading.attr("main_thread")().attr("ident").cast<unsigned long>();
}

bool on_main_thread() { return PyThread_get_thread_ident() == main_thread; }

void drop_on_main_thread(py::object object) {
  if (on_main_thread() || !interpreter_is_running()) {
    const PyRef here(std::move(object));
    return;
  }
  PyObject* const owned = object.release().ptr();
  if (owned == nullptr) {
    return;
  }
  const std::lock_guard lock(dropped().mutex);
  dropped().objects.push_back(owned);
  if (!dropped().scheduled) {
    // If Python's queue is full, the next drop schedules it again.
    dropped().scheduled = Py_AddPendingCall(drop_all, nullptr) == 0;
  }
}

}  // namespace commhook
