// Calls a Python class's override of a group's method, with the group's hooks around it.
#pragma once

#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <string>
#include <utility>

#include "runtime/process_group/group_hooks.h"
#include "runtime/process_group/override_method.h"
#include "runtime/process_group/py_process_group.h"

namespace commhook {

namespace py = pybind11;

// For example "Group.allreduce".
std::string name_in(const PyProcessGroup& group, const PyMethod& method);

template <typename Result, typename Base, typename... Arguments>
Result PyProcessGroup::call(const PyMethod& method, const Base& base,
                            const Arguments&... arguments) const {
  return call_override<Result>(
      this, method, [this] { return python_object_of(*this); }, base, arguments...);
}

template <typename Result, typename Base, typename... Arguments>
Result PyProcessGroup::with_hooks(const PyMethod& method, const Base& base,
                                  const Arguments&... arguments) const {
  if (!hooked_ || detail::ActiveOverride::exists(this, method) || !interpreter_is_running()) {
    return call<Result>(method, base, arguments...);
  }
  py::gil_scoped_acquire gil;
  const auto self = python_object_of(*this);
  const auto found = self ? method.find(self) : PyMethod::Found{};
  // The override calls the hooks.
  if (found.name != nullptr && is_override_method(found.attribute)) {
    return call<Result>(method, base, arguments...);
  }
  try {
    const py::cpp_function function([&](const py::args&, const py::kwargs&) -> Result {
      py::gil_scoped_release no_gil;
      return call<Result>(method, base, arguments...);
    });
    return Returned<Result>::from(
        run_with_hooks(self, method, function, py::make_tuple(self, arguments...), {}),
        {self, method});
  } catch (py::error_already_set& error) {
    std::rethrow_exception(persistent(error));
  }
}

template <typename Result, typename Base, typename... Arguments>
Result PyProcessGroup::collective(const PyMethod& method, const Base& base,
                                  const Arguments&... arguments) const {
  return with_hooks<Result>(
      method,
      [&]() -> Result {
        TORCH_CHECK_NOT_IMPLEMENTED(!deviceTypeToBackendType_.empty(), name_in(*this, method),
                                    " is not implemented: define it, or give the group a backend");
        return base();
      },
      arguments...);
}

#if COMMHOOK_TORCH_AT_LEAST(2, 14)
template <typename Hook>
void PyProcessGroup::register_hook(const PyMethod& method, int64_t hook_id, Hook hook) {
  py::gil_scoped_acquire gil;
  call<void>(
      method,
      [&] { TORCH_CHECK_NOT_IMPLEMENTED(false, name_in(*this, method), " is not implemented"); },
      hook_id, python_hook(std::move(hook)));
}
#endif

}  // namespace commhook
