// The function types of autograd hooks in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <variant>
#include <vector>

namespace commhook {

// A missing gradient is an undefined tensor. An undefined tensor in a result drops that gradient.
// Several threads may call one hook at once.

// Takes a tensor's gradient; returns the gradient that replaces it.
using TensorHook = std::function<at::Tensor(const at::Tensor& grad)>;
// Takes a node's grad_outputs before the node runs; returns as many gradients.
using PreHook = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& grad_outputs)>;
// Takes a node's grad_inputs after the node has run; returns as many gradients.
using PostHook = std::function<std::vector<at::Tensor>(
    const std::vector<at::Tensor>& grad_inputs, const std::vector<at::Tensor>& grad_outputs)>;
// Takes a parameter after its gradient has been accumulated.
using PostAccumulateHook = std::function<void(const at::Tensor& parameter)>;

using AutogradHookFunction = std::variant<TensorHook, PreHook, PostHook, PostAccumulateHook>;

}  // namespace commhook
