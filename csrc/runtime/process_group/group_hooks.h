// Converts hooks of process groups, which C++ can register since torch 2.14, to Python callables.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "runtime/python/torch_release.h"

#if COMMHOOK_TORCH_AT_LEAST(2, 14)

#include <torch/csrc/distributed/c10d/Hooks.hpp>

namespace commhook {

// The results call a hook without the GIL. Use them with the GIL held.
pybind11::object python_hook(c10d::PreHook hook);
pybind11::object python_hook(c10d::PostHook hook);
pybind11::object python_hook(c10d::AbortHook hook);
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
// Called only after success, as in c10d.
pybind11::object python_hook(c10d::CompletionHook hook);
#endif

}  // namespace commhook

#endif
