// The operator commhook::unflatten_into, called from C++.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

namespace commhook {

// `buffer` into `tensors`, cast on the way, outside of autograd. Needs no GIL.
inline void unflatten_into(const at::Tensor& buffer, at::TensorList tensors) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("commhook::unflatten_into", "")
                             .typed<void(const at::Tensor&, at::TensorList, double)>();
  at::NoGradGuard no_grad;
  op.call(buffer, tensors, 1.0);
}

}  // namespace commhook
