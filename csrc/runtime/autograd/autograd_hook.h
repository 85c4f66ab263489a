// A hook of the autograd engine, and lists of them.
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

// A hook that runs without the GIL: it gets the values and, if it is a post-hook, the others, and
// gives new values.
using NativeHook =
    std::function<variable_list(const variable_list& values, const variable_list& others)>;

class AutogradHook {
 public:
  // A Python callable, or what runs in its place. `traced` is what compiled autograd calls: it has
  // the same signature and checks the same.
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

// Hooks in order of registration. Whoever runs them takes a snapshot: one that is removed meanwhile
// still runs, one that is added does not.
class HookList {
 public:
  // The Python objects of the hooks are kept in `dict` as well, an OrderedDict, if one is given.
  // Who owns the list owns the dict, too.
  explicit HookList(PyObject* dict = nullptr) : dict_(dict) {}

  using Snapshot = std::shared_ptr<const std::vector<std::shared_ptr<const AutogradHook>>>;

  // Need the GIL. `hook` is an AutogradHook.
  int64_t add(const pybind11::object& hook);
  void remove(int64_t id);

  bool contains(int64_t id) const;
  Snapshot snapshot() const;  // null where there are none

 private:
  mutable std::mutex mutex_;
  PyObject* const dict_;
  int64_t next_id_ = 0;
  struct Entry {
    int64_t id;
    PyObject* key;  // in the dict, which holds it
  };
  std::vector<Entry> entries_;
  Snapshot hooks_;
};

// All hooks in such a dict: ours, and Python's own. Takes the GIL.
HookList::Snapshot all_hooks(PyObject* dict);

// Calls add(c10::SafePyObject) with what compiled autograd calls for each hook. Needs the GIL.
template <typename Add>
void each_traced(const HookList::Snapshot& hooks, const Add& add) {
  if (hooks) {
    for (const auto& hook : *hooks) {
      add(c10::SafePyObject(hook->traced().get().inc_ref().ptr(), getPyInterpreter()));
    }
  }
}

}  // namespace commhook
