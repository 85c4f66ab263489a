#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace commhook {

// Calls `callback()` when compiled autograd captures a graph with one of the parameters, before it
// reads the hooks of the parameter's node, until a call returns True. Eager mode never calls it.
void call_before_capture(const std::vector<at::Tensor>& parameters, pybind11::object callback);

}  // namespace commhook
