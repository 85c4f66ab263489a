// Autograd kernels of the operators that write to their arguments. Destinations must not be part of
// a graph that is being recorded. Their version counters move, so that autograd notices an
// overwritten saved tensor. The formulas of the functional operators are in bucket_autograd.cpp.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "commhook/ops.h"
#include "ops/autograd_checks.h"

namespace commhook {
namespace {

constexpr const char* kUseNoGrad = "call it under torch.no_grad()";

const auto& flatten_out_op() {
  static const auto op =
      ops::find_op<at::Tensor&(at::TensorList, double, at::Tensor&)>("commhook::flatten", "out");
  return op;
}

const auto& unflatten_into_op() {
  static const auto op =
      ops::find_op<void(const at::Tensor&, at::TensorList, double)>("commhook::unflatten_into");
  return op;
}

// The dispatch keys come from the dispatcher, less those that are done: reading them from the
// tensors again would take as long as all checks.

at::Tensor& check_flatten_out_grad(c10::DispatchKeySet keys, at::TensorList tensors, double scale,
                                   at::Tensor& out) {
  check_not_recorded("flatten", "out", -1, out, kUseNoGrad);
  check_not_recorded("flatten", "tensors", tensors, "without out= the operator is differentiable");
  check_no_forward_gradient("flatten", "out", -1, out);
  check_no_forward_gradient("flatten", "tensors", tensors);
  at::AutoDispatchBelowAutograd guard;
  return flatten_out_op().redispatch(keys & c10::after_autograd_keyset, tensors, scale, out);
}

void check_unflatten_into_grad(c10::DispatchKeySet keys, const at::Tensor& buffer,
                               at::TensorList tensors, double scale) {
  check_not_recorded("unflatten_into", "buffer", -1, buffer, "unflatten() is differentiable");
  check_not_recorded("unflatten_into", "tensors", tensors, kUseNoGrad);
  check_no_forward_gradient("unflatten_into", "buffer", -1, buffer);
  check_no_forward_gradient("unflatten_into", "tensors", tensors);
  at::AutoDispatchBelowAutograd guard;
  unflatten_into_op().redispatch(keys & c10::after_autograd_keyset, buffer, tensors, scale);
}

// A separate key, since inference mode excludes autograd's and can still write to normal tensors.
at::Tensor& flatten_out_versioned(c10::DispatchKeySet keys, at::TensorList tensors, double scale,
                                  at::Tensor& out) {
  check_has_version("flatten", "out", -1, out);
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    flatten_out_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, tensors, scale, out);
  }
  torch::autograd::increment_version(out);
  return out;
}

void unflatten_into_versioned(c10::DispatchKeySet keys, const at::Tensor& buffer,
                              at::TensorList tensors, double scale) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_has_version("unflatten_into", "tensors", static_cast<int64_t>(i), tensors[i]);
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    unflatten_into_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, buffer, tensors,
                                   scale);
  }
  for (const auto& tensor : tensors) {
    torch::autograd::increment_version(tensor);
  }
}

TORCH_LIBRARY_IMPL(commhook, Autograd, m) {
  m.impl("flatten.out", check_flatten_out_grad);
  m.impl("unflatten_into", check_unflatten_into_grad);
}

TORCH_LIBRARY_IMPL(commhook, ADInplaceOrView, m) {
  m.impl("flatten.out", flatten_out_versioned);
  m.impl("unflatten_into", unflatten_into_versioned);
}

}  // namespace
}  // namespace commhook
