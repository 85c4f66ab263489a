#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>

#include <string>

namespace commhook {

// Whether a Future completes within so many seconds. Releases the GIL meanwhile; the caller need
// not hold it. Throws Ctrl-C's exception as py::error_already_set: Python's main thread takes the
// GIL every half second to check for it.
bool wait_for(c10::ivalue::Future& future, double seconds);

// The same, but throws Python's TimeoutError as py::error_already_set if the Future does not
// complete. The message begins with `where`.
void wait_for_result(c10::ivalue::Future& future, const std::string& where, double seconds);

}  // namespace commhook
