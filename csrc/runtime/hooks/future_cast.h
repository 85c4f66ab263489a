// The last step of a hook of this library: hands its result to PyTorch's reducer.
#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

namespace commhook {

// A Future with the Python tensor `destination` as its value. Casts the result in `returned` (a
// Future or a tensor) into it, unless the result is that tensor. The result must have `dtype` and
// the destination's number of elements; messages of errors begin with `where`. The thread that
// completes `returned` does the work, without the GIL. Called with the GIL.
std::shared_ptr<torch::jit::PythonFutureWrapper> cast_into(const pybind11::object& returned,
                                                           const pybind11::object& destination,
                                                           at::ScalarType dtype,
                                                           const std::string& where);

}  // namespace commhook
