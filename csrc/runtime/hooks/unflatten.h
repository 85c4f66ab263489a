// Results into gradients.
#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "commhook/ops.h"

namespace commhook {

// `buffer` into `tensors`, scaled and cast on the way, outside of autograd. It may lie in the same
// memory: a hook may give back what it has made in a gradient. Needs no GIL.
inline void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale = 1.0) {
  const at::NoGradGuard no_grad;
  const bool aliases = std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return buffer.is_alias_of(tensor);
  });
  ops::unflatten_into(aliases ? buffer.clone() : buffer, tensors, scale);
}

}  // namespace commhook
