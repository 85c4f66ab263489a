// Lists of hooks on the engine's objects that Python's garbage collector can traverse.
//
// A hook may hold the node or the tensor that it is on, and Python's garbage collector must see
// this reference. So our classes derive from PyTorch's own hook classes, by whose name the
// collector finds the dict of a node's hooks. Our hooks are also kept in such a dict
// (csrc/runtime/autograd/collectable_hooks.h). PyTorch then puts hooks of its own into that dict,
// which run in their place among ours. On a tensor, PyTorch's hooks and ours each keep their order,
// and ours of accumulated gradients come first. Results follow PyTorch's rules: a None inside a
// returned tuple drops that gradient.
#pragma once

#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>

#include "runtime/autograd/autograd_hook.h"

namespace commhook {

// A hook may hold the node or tensor that it is on. PyTorch's collector gets from these to hooks
// through the dicts of torch::autograd::PyFunctionPreHook and similar classes. So the classes here
// derive from them, and such a dict holds the Python objects of this library's hooks. PyTorch adds
// its own hooks to the first such dict of a node; they run like these, in the dict's order.

// A dict, and the list of this library's hooks in it. Constructed with the GIL.
struct HookDict {
  HookDict()
      : dict(pybind11::reinterpret_steal<pybind11::dict>(PyODict_New())),
        list(std::make_shared<HookList>(dict.ptr())) {}
  const pybind11::dict dict;  // an OrderedDict; PyTorch's handles keep weak references to it
  const std::shared_ptr<HookList> list;
};

// A list of hooks that derives from one of PyTorch's classes.
template <typename Base>
class CollectableHooks : public Base {
 public:
  template <typename... Arguments>
  explicit CollectableHooks(const HookDict& hooks, Arguments... arguments)
      : Base(hooks.dict.ptr(), arguments...), list_(hooks.list) {}

  const std::shared_ptr<HookList>& list() const { return list_; }

 protected:
  // Null if there are no hooks.
  HookList::Snapshot hooks() const {
    auto own = list_->snapshot();
    // One word, which is safe to read without the GIL.
    const auto in_dict = static_cast<size_t>(PyDict_GET_SIZE(this->dict));
    return in_dict > (own ? own->size() : 0) ? all_hooks(this->dict) : own;
  }

 private:
  std::shared_ptr<HookList> list_;
};

}  // namespace commhook
