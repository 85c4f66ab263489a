// Hooks of process groups, which C++ registers since torch 2.14, as Python callables.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "runtime/python/torch_release.h"

#if COMMHOOK_TORCH_AT_LEAST(2, 14)

#include <torch/csrc/distributed/c10d/Hooks.hpp>

namespace commhook {

// A hook is called without the GIL. To be used with the GIL held.
pybind11::object python_hook(c10d::PreHook hook);
pybind11::object python_hook(c10d::PostHook hook);
pybind11::object python_hook(c10d::AbortHook hook);
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
// Only of what has succeeded, as c10d has it.
pybind11::object python_hook(c10d::CompletionHook hook);
#endif

}  // namespace commhook

#endif
