// The operator commhook::unflatten_into, called from C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include "ops/op_handle.h"

namespace commhook {

// `buffer` into `tensors`, cast on the way, outside of autograd. Needs no GIL.
inline void unflatten_into(const at::Tensor& buffer, at::TensorList tensors) {
  static const auto op =
      find_op<void(const at::Tensor&, at::TensorList, double)>("commhook::unflatten_into");
  at::NoGradGuard no_grad;
  op.call(buffer, tensors, 1.0);
}

}  // namespace commhook
