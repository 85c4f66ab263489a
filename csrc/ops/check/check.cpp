// The checks of a hook as operators: their reference kernels (plain ATen, every device) and their
// autograd kernels. They return nothing, so they have no derivatives.
//
// check_hook_result and check_finite return nothing, and must run once for each call, wherever the
// compiler places them. They achieve this differently, because only one writes to an argument.
//
// check_finite adds to a count that outlives the call. A compiler keeps such a write, once, in its
// place, also in a compiled backward. It costs no copy. The host reads the count when the user asks
// (autograd.FiniteCheck), so a CUDA graph can hold it. A count on CUDA is marked as an input whose
// address stays: Inductor makes no CUDA graph of a graph that writes any other input.
//
// check_hook_result is registered as effectful: AOTAutograd orders calls by a token, which Inductor
// removes again. tests/ops/test_ops_check.py counts the calls. Also tried:
//
// - Nothing: no call is left, except in an exported program before decomposition.
// - Marked for FX as having side effects: each call runs in the forward too, if the hook checks
//   values of the forward alone; up to torch 2.13 two equal calls become one.
// - A mutation of result declared, but not done: the declaration is false, and CUDA graphs are not
//   used where result is an input.
// - result as return value: an operator may not return its input, so it is a copy of the gradient.
// - Effectful, as it is: graphs with it are not cached between processes, and it is lost in a
//   branch of torch.cond (an error in Inductor).
//
// It has no derivative, and autograd ignores it: a checked value stays differentiable. Its fake
// raises if a dtype, layout, device, number of dimensions, or a size known while compiling differs.
// It asks for no guard, which would compile again for each pair of sizes. The kernel checks sizes
// that are unknown at that time. An opaque operator makes Inductor write both tensors to memory,
// although it might have kept one in registers.
#include "ops/check/check.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

#include "commhook/ops.h"
#include "ops/autograd_checks.h"
#include "ops/bucket/bucket_dtype.h"
#include "ops/check/hook_value.h"
#include "ops/memory_check.h"

namespace commhook {

void check_finite_arguments(at::TensorList tensors, const at::Tensor& count) {
  TORCH_CHECK_TYPE(count.defined(), "check_finite: count must be a tensor, got None");
  TORCH_CHECK_TYPE(count.scalar_type() == at::kLong,
                   "check_finite: count must be of dtype torch.int64, got ",
                   dtype_name(count.scalar_type()));
  TORCH_CHECK_TYPE(count.layout() == at::kStrided,
                   "check_finite: count must be dense (torch.strided), got layout ",
                   layout_name(count.layout()));
  TORCH_CHECK_VALUE(count.sym_numel() == 1, "check_finite: count must hold one element, got ",
                    count.sym_numel());
  check_memory("check_finite", "count", -1, count);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    TORCH_CHECK(tensors[i].defined(), "check_finite: ", argument_name("tensors", index),
                " must be a tensor, got None");
    TORCH_CHECK_VALUE(
        tensors[i].device() == count.device(), "check_finite: ", argument_name("tensors", index),
        " must be on the device of count, ", count.device(), ", got ", tensors[i].device());
    check_memory("check_finite", "tensors", index, tensors[i]);
  }
}

Checked split_by_dtype(at::TensorList tensors) {
  Checked checked;
  for (const auto& tensor : tensors) {
    if (!is_bucket_dtype(tensor.scalar_type())) {
      checked.others.push_back(tensor);
    } else if (!tensor.is_contiguous() && tensor.is_non_overlapping_and_dense()) {
      checked.rows.push_back(tensor.as_strided({tensor.numel()}, {1}));
    } else {
      checked.rows.push_back(tensor);
    }
  }
  return checked;
}

namespace reference {

void check_finite(at::TensorList tensors, const at::Tensor& count) {
  check_finite_arguments(tensors, count);
  for (const auto& tensor : tensors) {
    if (!tensor.is_floating_point() && !tensor.is_complex()) {
      continue;
    }
    // The 8-bit dtypes have no arithmetic.
    const auto values =
        c10::isFloat8Type(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor.detach();
    count.add_(values.isfinite().logical_not_().sum());
  }
}

}  // namespace reference

namespace {

const auto& check_finite_op() {
  static const auto op =
      ops::find_op<void(at::TensorList, const at::Tensor&)>("commhook::check_finite");
  return op;
}

void check_hook_result(const at::Tensor& result, const at::Tensor& value, std::string_view hook) {
  TORCH_CHECK_TYPE(result.defined() && value.defined(),
                   "check_hook_result: ", result.defined() ? "value" : "result",
                   " must be a tensor, got None");
  check_hook_value(value, result, [&] { return c10::str("hook '", hook, "'"); });
}

// The elements that a sparse tensor stores, duplicates included: adding up those of one index would
// make the host wait for their number.
at::Tensor stored_values(const at::Tensor& tensor, int64_t index) {
  switch (tensor.layout()) {
    case at::kStrided:
      return tensor;
    case at::kSparse:
      return tensor._values();
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc:
      return tensor.values();
    default:
      TORCH_CHECK_TYPE(false, "check_finite: ", argument_name("tensors", index),
                       " must be dense or sparse, got layout ", layout_name(tensor.layout()));
  }
}

void check_finite(at::TensorList tensors, const at::Tensor& count) {
  const auto is_dense = [](const at::Tensor& tensor) { return tensor.layout() == at::kStrided; };
  if (!is_dense(count) || std::all_of(tensors.begin(), tensors.end(), is_dense)) {
    return reference::check_finite(tensors, count);
  }
  std::vector<at::Tensor> values;
  values.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    values.push_back(stored_values(tensors[i], static_cast<int64_t>(i)));
  }
  check_finite_op().call(values, count);
}

void check_finite_below_autograd(at::TensorList tensors, const at::Tensor& count) {
  at::AutoDispatchBelowAutograd guard;
  check_finite_op().call(tensors, count);
}

// A separate key, since inference mode excludes autograd's and can still write to normal tensors.
void check_finite_versioned(at::TensorList tensors, const at::Tensor& count) {
  check_has_version("check_finite", "count", -1, count);
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_finite_op().call(tensors, count);
  }
  torch::autograd::increment_version(count);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("check_hook_result", check_hook_result);
  m.impl("check_finite", check_finite);
}

TORCH_LIBRARY_IMPL(commhook, Autograd, m) {
  m.impl("check_hook_result", torch::CppFunction::makeFallthrough());
  m.impl("check_finite", check_finite_below_autograd);
}

TORCH_LIBRARY_IMPL(commhook, ADInplaceOrView, m) { m.impl("check_finite", check_finite_versioned); }

// The check does not read values, so a conjugate need not be computed.
TORCH_LIBRARY_IMPL(commhook, Conjugate, m) {
  m.impl("check_hook_result", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(commhook, Negative, m) {
  m.impl("check_hook_result", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(commhook, ZeroTensor, m) {
  m.impl("check_hook_result", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace commhook
