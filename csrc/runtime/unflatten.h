#pragma once

#include <ATen/core/grad_mode.h>

#include "commhook/ops.h"

namespace commhook {

// `buffer` into `tensors`, cast on the way, outside of autograd. Needs no GIL.
inline void unflatten_into(const at::Tensor& buffer, at::TensorList tensors) {
  const at::NoGradGuard no_grad;
  ops::unflatten_into(buffer, tensors);
}

}  // namespace commhook
