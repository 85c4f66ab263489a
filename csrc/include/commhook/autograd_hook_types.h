// What an autograd hook in C++ is.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <variant>
#include <vector>

namespace commhook {

// Gradients that are missing are undefined tensors. An undefined tensor in a result drops that
// gradient. Any thread may call, several at once.

// A tensor's gradient -> the gradient from here on.
using TensorHook = std::function<at::Tensor(const at::Tensor& grad)>;
// A node's grad_outputs, before it runs -> as many.
using PreHook = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& grad_outputs)>;
// A node's grad_inputs, when it has run -> as many.
using PostHook = std::function<std::vector<at::Tensor>(
    const std::vector<at::Tensor>& grad_inputs, const std::vector<at::Tensor>& grad_outputs)>;
// A parameter whose gradient has been accumulated.
using PostAccumulateHook = std::function<void(const at::Tensor& parameter)>;

using AutogradHookFunction = std::variant<TensorHook, PreHook, PostHook, PostAccumulateHook>;

}  // namespace commhook
