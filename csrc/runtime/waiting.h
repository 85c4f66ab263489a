#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>

namespace commhook {

// Whether a torch.futures.Future completes within so many seconds. Lets go of the GIL meanwhile.
// Throws what Ctrl-C raises.
bool wait_for(const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, double seconds);

}  // namespace commhook
