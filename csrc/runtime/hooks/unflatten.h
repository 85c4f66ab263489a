// Copies results into gradients.
#pragma once

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "commhook/ops.h"

namespace commhook {

// Copies `buffer` into `tensors`, scaled and cast, outside of autograd. They may share memory: a
// hook may return a result that it computed inside a gradient. Needs no GIL.
inline void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale = 1.0) {
  const at::NoGradGuard no_grad;
  const bool aliases = std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return buffer.is_alias_of(tensor);
  });
  ops::unflatten_into(aliases ? buffer.clone() : buffer, tensors, scale);
}

}  // namespace commhook
