// Hooks that run after a parameter's gradient has been accumulated.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>

#include "runtime/autograd/engine_hooks.h"
#include "runtime/reducer/arrivals.h"

namespace commhook {

// A tensor holds one PostAccumulateGradHook: PyTorch's, with a dict of Python hooks. This replaces
// it, and keeps it. It runs, in this order: the hooks registered here, those of PyTorch's dict, and
// a reducer's counting.

Registered register_post_accumulate_hook(const pybind11::object& tensor,
                                         const pybind11::object& hook);

// Makes the autograd engine count a parameter's gradients as `number`. Under compiled autograd the
// hook with `own_key` in PyTorch's dict counts them; otherwise that hook must do nothing.
void count_arrivals(const pybind11::object& parameter, int64_t own_key,
                    std::shared_ptr<Arrivals> arrivals, int64_t number);
void stop_counting(const at::Tensor& parameter);

}  // namespace commhook
