// The last step of a hook of this library: its result as PyTorch's reducer wants it.
#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace commhook {

// A Future whose value is the Python tensor `destination`, into which the tensor of `future` is
// cast, unless it is that already. The work is done by whatever thread completes `future`, without
// the GIL. Called with the GIL.
std::shared_ptr<torch::jit::PythonFutureWrapper> cast_into(
    const std::shared_ptr<torch::jit::PythonFutureWrapper>& future,
    const pybind11::object& destination);

}  // namespace commhook
