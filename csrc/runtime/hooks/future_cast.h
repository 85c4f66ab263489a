// The last step of a hook of this library: its result as PyTorch's reducer wants it.
#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

namespace commhook {

// A Future whose value is the Python tensor `destination`, into which the result in `returned` (a
// Future or a tensor) is cast, unless it is that already. The result must have `dtype` and as many
// elements as the destination; `where` begins the message of an error. The work is done by whatever
// thread completes `returned`, without the GIL. Called with the GIL.
std::shared_ptr<torch::jit::PythonFutureWrapper> cast_into(const pybind11::object& returned,
                                                           const pybind11::object& destination,
                                                           at::ScalarType dtype,
                                                           const std::string& where);

}  // namespace commhook
