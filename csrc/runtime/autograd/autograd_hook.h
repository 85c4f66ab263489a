// Hooks of the autograd engine, and lists of them.
#pragma once

#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/python/py_ref.h"

namespace commhook {

using torch::autograd::variable_list;

enum class HookKind {
  kTensor,          // hook(grad) -> Tensor or None
  kPre,             // hook(grad_outputs) -> tuple or None
  kPost,            // hook(grad_inputs, grad_outputs) -> tuple or None
  kPostAccumulate,  // hook(parameter) -> None
};

// "tensor", "prehook", "posthook" or "post_accumulate".
HookKind hook_kind(const std::string& name);
const char* name_of(HookKind kind);

// A hook that runs without the GIL. It receives the values and, if it is a post-hook, the others;
// it returns the new values.
using NativeHook =
    std::function<variable_list(const variable_list& values, const variable_list& others)>;

class AutogradHook {
 public:
  // A Python callable, or the native function that runs in its place. Compiled autograd calls
  // `traced`, which has the same signature and makes the same checks.
  AutogradHook(pybind11::object callable, NativeHook native, pybind11::object traced)
      : callable_(std::move(callable)), traced_(std::move(traced)), native_(std::move(native)) {}

  bool is_native() const { return static_cast<bool>(native_); }
  const NativeHook& native() const { return native_; }
  const PyRef& callable() const { return callable_; }
  const PyRef& traced() const { return traced_; }
  std::string name() const;  // takes the GIL

 private:
  PyRef callable_;
  PyRef traced_;
  NativeHook native_;
};

// Hooks in order of registration. A caller runs a snapshot: a hook that is removed meanwhile still
// runs, and one that is added does not.
class HookList {
 public:
  // `dict`, an OrderedDict, also keeps the Python objects of the hooks, if it is given. The owner
  // of the list owns the dict too.
  explicit HookList(PyObject* dict = nullptr) : dict_(dict) {}

  using Snapshot = std::shared_ptr<const std::vector<std::shared_ptr<const AutogradHook>>>;

  // These need the GIL. `hook` is an AutogradHook.
  int64_t add(const pybind11::object& hook);
  void remove(int64_t id);

  bool contains(int64_t id) const;
  Snapshot snapshot() const;  // null if there are no hooks

 private:
  mutable std::mutex mutex_;
  PyObject* const dict_;
  int64_t next_id_ = 0;
  struct Entry {
    int64_t id;
    PyObject* key;  // a key of the dict, which owns it
  };
  std::vector<Entry> entries_;
  Snapshot hooks_;
};

// All hooks in such a dict: hooks of this library and Python's own. Takes the GIL.
HookList::Snapshot all_hooks(PyObject* dict);

// For each hook, calls add(c10::SafePyObject) with the object that compiled autograd calls. Needs
// the GIL.
template <typename Add>
void each_traced(const HookList::Snapshot& hooks, const Add& add) {
  if (hooks) {
    for (const auto& hook : *hooks) {
      add(c10::SafePyObject(hook->traced().get().inc_ref().ptr(), getPyInterpreter()));
    }
  }
}

}  // namespace commhook
