#include "runtime/python/module_members.h"

#include <unordered_set>
#include <vector>

namespace py = pybind11;

namespace commhook {
namespace {

// One step of splitmix64.
uint64_t mixed(uint64_t state, uint64_t number) {
  state = (state + number + 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
  return state ^ (state >> 29U);
}

py::object dict_of(const py::object& module, const char* name) {
  py::object found = py::getattr(module, name, py::none());
  return PyDict_Check(found.ptr()) ? found : py::none();
}

}  // namespace

uint64_t module_members(const py::object& model) {
  uint64_t state = 0;
  std::unordered_set<const PyObject*> seen;
  std::vector<py::object> waiting{model};
  while (!waiting.empty()) {
    const py::object module = std::move(waiting.back());
    waiting.pop_back();
    if (module.is_none() || !seen.insert(module.ptr()).second) {
      continue;
    }
    state = mixed(state, reinterpret_cast<uintptr_t>(module.ptr()));
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    if (const auto parameters = dict_of(module, "_parameters"); !parameters.is_none()) {
      while (PyDict_Next(parameters.ptr(), &position, nullptr, &value) != 0) {
        state = mixed(state, reinterpret_cast<uintptr_t>(value));
      }
    }
    if (const auto modules = dict_of(module, "_modules"); !modules.is_none()) {
      position = 0;
      while (PyDict_Next(modules.ptr(), &position, nullptr, &value) != 0) {
        waiting.push_back(py::reinterpret_borrow<py::object>(value));
      }
    }
  }
  return state;
}

}  // namespace commhook
