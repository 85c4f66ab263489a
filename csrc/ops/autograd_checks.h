// Checks of the operators' autograd kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <cstdint>
#include <string>

namespace commhook {

// "tensors[3]", or "out" without an index.
inline std::string argument_name(const char* argument, int64_t index) {
  return index < 0 ? std::string(argument) : c10::str(argument, "[", index, "]");
}

// Refuses a tensor that is part of a graph that is being recorded.
inline void check_not_recorded(const char* op, const char* argument, int64_t index,
                               const at::Tensor& tensor, const char* remedy) {
  if (!tensor.defined() || !tensor.requires_grad() || !at::GradMode::is_enabled()) {
    return;
  }
  TORCH_CHECK(false, op, ": ", argument_name(argument, index),
              " must not require grad while gradients are recorded, got a ",
              tensor.is_leaf() ? "leaf" : "non-leaf", " tensor that does; ", remedy);
}

inline void check_not_recorded(const char* op, const char* argument, at::TensorList tensors,
                               const char* remedy) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_not_recorded(op, argument, static_cast<int64_t>(i), tensors[i], remedy);
  }
}

// The operators have no forward-mode derivatives. Without this check these would be lost silently.
inline void check_no_forward_gradient(const char* op, const char* argument, int64_t index,
                                      const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(), op, ": ",
      argument_name(argument, index),
      " must not be a dual tensor of torch.autograd.forward_ad: the operator has no "
      "forward-mode derivative");
}

inline void check_no_forward_gradient(const char* op, const char* argument,
                                      at::TensorList tensors) {
  // Outside of torch.autograd.forward_ad no tensor has one, so no tensor needs a check.
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr) {
    return;
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_no_forward_gradient(op, argument, static_cast<int64_t>(i), tensors[i]);
  }
}

// A tensor made in inference mode has no version counter. Call this before anything is written.
inline void check_has_version(const char* op, const char* argument, int64_t index,
                              const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_inference() || c10::InferenceMode::is_enabled(), op, ": ",
              argument_name(argument, index),
              " must not be an inference tensor outside of torch.inference_mode()");
}

}  // namespace commhook
