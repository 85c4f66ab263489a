// Derivatives of the bucket operators that return new tensors. C++ saves the cost of Python in a
// call that records nothing. It also refuses a number that is not a dtype before PyTorch makes a
// Python object of it, which ends the process. (Tensors from inference mode do not get here.)
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "commhook/ops.h"
#include "ops/autograd_checks.h"
#include "ops/bucket/bucket.h"

namespace commhook {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Dtype = std::optional<at::ScalarType>;
using Stats = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// ---- the operators, called again below autograd -------------------------------------------

const auto& flatten_op() {
  static const auto op =
      ops::find_op<at::Tensor(at::TensorList, double, Dtype)>("commhook::flatten");
  return op;
}

const auto& flatten_stats_op() {
  static const auto op =
      ops::find_op<Stats(at::TensorList, double, Dtype)>("commhook::flatten_stats");
  return op;
}

const auto& unflatten_op() {
  static const auto op =
      ops::find_op<variable_list(const at::Tensor&, at::TensorList, double)>("commhook::unflatten");
  return op;
}

// ---- shared by the three -----------------------------------------------------------------------

// torch.func's transforms do not accept an autograd::Function of C++. Inside them, the operators
// run as a composition of differentiable ones.
bool in_functorch() {
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(
      c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
}

bool is_recorded(at::TensorList tensors) {
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

// The shapes, strides and dtypes of tensors, as values that autograd can save. Saving the tensors
// would keep their memory.
void save_shapes(AutogradContext* ctx, at::TensorList tensors) {
  std::vector<c10::SymInt> shapes;
  std::vector<int64_t> dims_and_dtypes;
  for (const auto& tensor : tensors) {
    const auto sizes = tensor.sym_sizes();
    const auto strides = tensor.sym_strides();
    shapes.insert(shapes.end(), sizes.begin(), sizes.end());
    shapes.insert(shapes.end(), strides.begin(), strides.end());
    dims_and_dtypes.push_back(tensor.dim());
    dims_and_dtypes.push_back(static_cast<int64_t>(tensor.scalar_type()));
  }
  ctx->saved_data["shapes"] = c10::SymIntArrayRef(shapes);
  ctx->saved_data["dims_and_dtypes"] = dims_and_dtypes;
}

// Empty tensors of these shapes, on the device of `gradient`.
variable_list tensors_of_saved_shapes(AutogradContext* ctx, const at::Tensor& gradient) {
  const auto shapes = ctx->saved_data["shapes"].toSymIntVector();
  const auto dims_and_dtypes = ctx->saved_data["dims_and_dtypes"].toIntVector();
  variable_list tensors;
  auto next = shapes.begin();
  for (size_t i = 0; i < dims_and_dtypes.size(); i += 2) {
    const auto dim = dims_and_dtypes[i];
    const std::vector<c10::SymInt> sizes(next, next + dim);
    const std::vector<c10::SymInt> strides(next + dim, next + 2 * dim);
    next += 2 * dim;
    const auto like = gradient.options().dtype(static_cast<at::ScalarType>(dims_and_dtypes[i + 1]));
    tensors.push_back(at::empty_strided_symint(sizes, strides, like));
  }
  return tensors;
}

// One gradient for each input: undefined ones for the `others` arguments that are no tensors.
variable_list padded(variable_list gradients, size_t others) {
  gradients.resize(gradients.size() + others);
  return gradients;
}

// ---- flatten ------------------------------------------------------------------------------

struct Flatten : Function<Flatten> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, at::TensorList tensors, double scale,
                            Dtype dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["scale"] = scale;
    save_shapes(ctx, tensors);
    return flatten_op().call(tensors, scale, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto like = tensors_of_saved_shapes(ctx, gradients[0]);
    const auto scale = ctx->saved_data["scale"].toDouble();
    return padded(unflatten_op().call(gradients[0].contiguous(), like, scale), 2);
  }
};

at::Tensor flatten(c10::DispatchKeySet keys, at::TensorList tensors, double scale, Dtype dtype) {
  check_buffer_dtype("flatten", dtype);
  if (in_functorch()) {
    return reference::flatten(tensors, scale, dtype);
  }
  check_no_forward_gradient("flatten", "tensors", tensors);
  if (is_recorded(tensors)) {
    return Flatten::apply(tensors, scale, dtype);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return flatten_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, tensors, scale, dtype);
}

// ---- flatten_stats ------------------------------------------------------------------------

struct FlattenStats : Function<FlattenStats> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, double scale,
                               Dtype dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["scale"] = scale;
    ctx->save_for_backward(tensors.vec());
    ctx->set_materialize_grads(false);
    auto [buffer, sum_of_squares, nonfinite_count] = flatten_stats_op().call(tensors, scale, dtype);
    return {buffer, sum_of_squares, nonfinite_count};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto tensors = ctx->get_saved_variables();
    const auto scale = ctx->saved_data["scale"].toDouble();
    variable_list results(tensors.size());
    if (gradients[0].defined()) {
      results = unflatten_op().call(gradients[0].contiguous(), tensors, scale);
    }
    if (gradients[1].defined()) {
      // d(sum (scale x)^2)/dx = 2 scale^2 x, in float64 like the sum.
      const auto factor = gradients[1] * (2.0 * scale * scale);
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto own = tensors[i].to(at::kDouble) * factor;
        results[i] = (results[i].defined() ? results[i] + own : own).to(tensors[i].scalar_type());
      }
    }
    return padded(std::move(results), 2);
  }
};

Stats flatten_stats(c10::DispatchKeySet keys, at::TensorList tensors, double scale, Dtype dtype) {
  check_buffer_dtype("flatten_stats", dtype);
  if (in_functorch()) {
    return reference::flatten_stats(tensors, scale, dtype);
  }
  check_no_forward_gradient("flatten_stats", "tensors", tensors);
  if (is_recorded(tensors)) {
    const auto outputs = FlattenStats::apply(tensors, scale, dtype);
    return {outputs[0], outputs[1], outputs[2]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return flatten_stats_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, tensors, scale,
                                       dtype);
}

// ---- unflatten ----------------------------------------------------------------------------

struct Unflatten : Function<Unflatten> {
  static constexpr bool is_traceable = true;

  // A separate type, which autograd does not look into: `like` is no part of the graph.
  struct Like {
    at::TensorList tensors;
  };

  static variable_list forward(AutogradContext* ctx, const at::Tensor& buffer, Like like,
                               double scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["shape"] = buffer.sym_sizes();
    ctx->saved_data["dtype"] = static_cast<int64_t>(buffer.scalar_type());
    return unflatten_op().call(buffer, like.tensors, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto flat =
        flatten_op().call(gradients, ctx->saved_data["scale"].toDouble(),
                          static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt()));
    return padded({flat.view_symint(ctx->saved_data["shape"].toSymIntVector())}, 2);
  }
};

// Computes like reference::unflatten, but does not write to tensors.
variable_list composed_unflatten(const at::Tensor& buffer, at::TensorList like, double scale) {
  check_unflatten("unflatten", buffer, like, "like");
  const auto flat = buffer.reshape(-1);
  variable_list tensors;
  int64_t offset = 0;
  for (const auto& tensor : like) {
    const auto piece = flat.narrow(0, offset, tensor.numel());
    const auto dtype = tensor.scalar_type();
    tensors.push_back(reference::scaled(piece, scale, dtype).to(dtype).view(tensor.sizes()));
    offset += tensor.numel();
  }
  return tensors;
}

variable_list unflatten(c10::DispatchKeySet keys, const at::Tensor& buffer, at::TensorList like,
                        double scale) {
  if (in_functorch()) {
    return composed_unflatten(buffer, like, scale);
  }
  check_no_forward_gradient("unflatten", "buffer", -1, buffer);
  if (is_recorded(buffer)) {
    return Unflatten::apply(buffer, Unflatten::Like{like}, scale);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return unflatten_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, buffer, like, scale);
}

TORCH_LIBRARY_IMPL(commhook, Autograd, m) {
  m.impl("flatten", flatten);
  m.impl("flatten_stats", flatten_stats);
  m.impl("unflatten", unflatten);
}

}  // namespace
}  // namespace commhook
