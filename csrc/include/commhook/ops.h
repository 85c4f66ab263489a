// The operators torch.ops.commhook.*, called from C++. They need no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace commhook::ops {

// The operator of that name and signature. To be kept in a static variable: finding it is slow.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

// Dense tensors of one device, one after another in row-major order, in a new flat tensor: scaled
// in float32 (float64 where a side is float64), then cast. By default of the tensors' dtype.
inline at::Tensor flatten(at::TensorList tensors, double scale = 1.0,
                          std::optional<at::ScalarType> dtype = std::nullopt) {
  static const auto op = find_op<at::Tensor(at::TensorList, double, std::optional<at::ScalarType>)>(
      "commhook::flatten");
  return op.call(tensors, scale, dtype);
}

// The same into a contiguous tensor, whose dtype decides.
inline at::Tensor& flatten_out(at::TensorList tensors, double scale, at::Tensor& out) {
  static const auto op =
      find_op<at::Tensor&(at::TensorList, double, at::Tensor&)>("commhook::flatten", "out");
  return op.call(tensors, scale, out);
}

// A flat buffer's contents into existing tensors, scaled and cast on the way.
inline void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale = 1.0) {
  static const auto op =
      find_op<void(const at::Tensor&, at::TensorList, double)>("commhook::unflatten_into");
  op.call(buffer, tensors, scale);
}

}  // namespace commhook::ops
