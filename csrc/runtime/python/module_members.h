// Detects changes in the modules and parameters of a model.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace commhook {

// A hash that almost certainly changes if a module or a parameter anywhere in `model` is replaced,
// removed or added. Keeps no reference. Needs the GIL.
uint64_t module_members(const pybind11::object& model);

}  // namespace commhook
