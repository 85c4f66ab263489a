// The parts of the Python module torch_commhook._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace commhook {

void bind_autograd_hooks(pybind11::module_& m);
void bind_bucket(pybind11::module_& m);
void bind_collectives(pybind11::module_& m);
void bind_cpp_hooks(pybind11::module_& m);
void bind_membership(pybind11::module_& m);
void bind_process_group(pybind11::module_& m);
void bind_profiling(pybind11::module_& m);
void bind_reducer(pybind11::module_& m);
void bind_wire(pybind11::module_& m);

}  // namespace commhook
