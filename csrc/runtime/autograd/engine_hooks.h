// Registers hooks with the autograd engine, on tensors and on nodes.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>

#include "runtime/autograd/autograd_hook.h"

namespace commhook {

// The place of a hook. Keeps neither the hook nor its tensor or node alive.
struct Registered {
  std::weak_ptr<HookList> list;
  int64_t id;
};

// Register a hook, an AutogradHook, with the engine.
Registered register_tensor_hook(const pybind11::object& tensor, const pybind11::object& hook);
Registered register_node_hook(const pybind11::object& node, HookKind kind,
                              const pybind11::object& hook);

}  // namespace commhook
