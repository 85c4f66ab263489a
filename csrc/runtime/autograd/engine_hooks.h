// Hooks where the autograd engine finds them: on tensors and on nodes.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>

#include "runtime/autograd/autograd_hook.h"

namespace commhook {

// Where a hook is. Keeps neither it nor what it is on alive.
struct Registered {
  std::weak_ptr<HookList> list;
  int64_t id;
};

// Put a hook, an AutogradHook, where the engine finds it.
Registered register_tensor_hook(const pybind11::object& tensor, const pybind11::object& hook);
Registered register_node_hook(const pybind11::object& node, HookKind kind,
                              const pybind11::object& hook);

}  // namespace commhook
