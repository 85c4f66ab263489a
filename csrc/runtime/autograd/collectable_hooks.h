// Lists of hooks on the engine's objects that Python's garbage collector can look through.
#pragma once

#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>

#include "runtime/autograd/autograd_hook.h"

namespace commhook {

// A hook may hold what it is on: a node, a tensor. PyTorch's collector finds its way from these to
// hooks in the dicts of torch::autograd::PyFunctionPreHook and its like, so that ours are classes
// derived from them, and Python objects for our hooks are in such a dict. PyTorch puts hooks of its
// own into the dict of the first of them that a node has; they run as ours do, in the dict's order.

// A dict, and the list of our hooks in it. Made with the GIL.
struct HookDict {
  HookDict()
      : dict(pybind11::reinterpret_steal<pybind11::dict>(PyODict_New())),
        list(std::make_shared<HookList>(dict.ptr())) {}
  const pybind11::dict dict;  // an OrderedDict, to which PyTorch's handles keep weak references
  const std::shared_ptr<HookList> list;
};

// A list of hooks, on one of PyTorch's classes.
template <typename Base>
class CollectableHooks : public Base {
 public:
  template <typename... Arguments>
  explicit CollectableHooks(const HookDict& hooks, Arguments... arguments)
      : Base(hooks.dict.ptr(), arguments...), list_(hooks.list) {}

  const std::shared_ptr<HookList>& list() const { return list_; }

 protected:
  // Null where there are none.
  HookList::Snapshot hooks() const {
    auto own = list_->snapshot();
    // One word, which may be read without the GIL.
    const auto in_dict = static_cast<size_t>(PyDict_GET_SIZE(this->dict));
    return in_dict > (own ? own->size() : 0) ? all_hooks(this->dict) : own;
  }

 private:
  std::shared_ptr<HookList> list_;
};

}  // namespace commhook
