// What runs when a parameter's gradient has been accumulated.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>

#include "runtime/autograd/engine_hooks.h"
#include "runtime/reducer/arrivals.h"

namespace commhook {

// A tensor holds one PostAccumulateGradHook: PyTorch's, with a dict of Python hooks. Ours takes its
// place and goes on holding it. In this order it runs the hooks registered here, those of PyTorch's
// dict, and the counting of a reducer.

Registered register_post_accumulate_hook(const pybind11::object& tensor,
                                         const pybind11::object& hook);

// Lets the autograd engine count a parameter's gradients as `number`. In PyTorch's dict, the hook
// with `own_key` does that under compiled autograd; here it must do nothing.
void count_arrivals(const pybind11::object& parameter, int64_t own_key,
                    std::shared_ptr<Arrivals> arrivals, int64_t number);
void stop_counting(const at::Tensor& parameter);

}  // namespace commhook
