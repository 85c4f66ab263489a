#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace commhook {

// Calls `callback()` when compiled autograd takes in a graph with one of the parameters, before it
// looks at the hooks of its node, until that says True. In eager nothing happens.
void call_before_capture(const std::vector<at::Tensor>& parameters, pybind11::object callback);

}  // namespace commhook
