// The operators torch.ops.commhook.*, called from C++. They need no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace commhook::ops {

// The operator with that name and signature. Keep it in a static variable: the lookup is slow.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

// Concatenates dense tensors of one device in row-major order into a new flat tensor: scaled in
// float32 (float64 if either side is float64), then cast. The default dtype is that of the tensors.
inline at::Tensor flatten(at::TensorList tensors, double scale = 1.0,
                          std::optional<at::ScalarType> dtype = std::nullopt) {
  static const auto op = find_op<at::Tensor(at::TensorList, double, std::optional<at::ScalarType>)>(
      "commhook::flatten");
  return op.call(tensors, scale, dtype);
}

// The same into a contiguous tensor, with that tensor's dtype.
inline at::Tensor& flatten_out(at::TensorList tensors, double scale, at::Tensor& out) {
  static const auto op =
      find_op<at::Tensor&(at::TensorList, double, at::Tensor&)>("commhook::flatten", "out");
  return op.call(tensors, scale, out);
}

// Copies a flat buffer into existing tensors, scaled and cast.
inline void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale = 1.0) {
  static const auto op =
      find_op<void(const at::Tensor&, at::TensorList, double)>("commhook::unflatten_into");
  op.call(buffer, tensors, scale);
}

}  // namespace commhook::ops
