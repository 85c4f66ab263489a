#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>

#include <string>

namespace commhook {

// Whether a Future completes within so many seconds. Lets go of the GIL meanwhile, which the caller
// may hold or not. Throws what Ctrl-C raises, as py::error_already_set.
// Python's main thread looks for that every half second; it takes the GIL.
bool wait_for(c10::ivalue::Future& future, double seconds);

// The same for what must complete: throws Python's TimeoutError, as py::error_already_set, where it
// does not. `where` begins the message.
void wait_for_result(c10::ivalue::Future& future, const std::string& where, double seconds);

}  // namespace commhook
