// Derivatives of the bucket operators that return new tensors. In C++, so that a call that records
// nothing costs no Python, and so that a bad dtype is refused before PyTorch makes a Python object
// of it (which ends the process where the number is none).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "ops/autograd_checks.h"
#include "ops/bucket.h"

namespace commhook {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Dtype = std::optional<at::ScalarType>;
using Stats = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// ---- the operators, as seen by the kernels below
// -------------------------------------------------

template <typename Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor call_flatten(at::TensorList tensors, double scale, Dtype dtype) {
  static const auto op = find_op<at::Tensor(at::TensorList, double, Dtype)>("commhook::flatten");
  return op.call(tensors, scale, dtype);
}

Stats call_flatten_stats(at::TensorList tensors, double scale, Dtype dtype) {
  static const auto op = find_op<Stats(at::TensorList, double, Dtype)>("commhook::flatten_stats");
  return op.call(tensors, scale, dtype);
}

variable_list call_unflatten(const at::Tensor& buffer, at::TensorList like, double scale) {
  static const auto op =
      find_op<variable_list(const at::Tensor&, at::TensorList, double)>("commhook::unflatten");
  return op.call(buffer, like, scale);
}

// ---- what forward hands to backward
// --------------------------------------------------------------

// The tensors as far as shapes, strides and dtypes go: what they hold may change before backward.
variable_list shapes_of(at::TensorList tensors) {
  variable_list shapes;
  shapes.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    shapes.push_back(tensor.variable_data());
  }
  return shapes;
}

// One gradient for each input, with an undefined one for each argument that is no tensor.
variable_list padded(variable_list gradients, size_t others) {
  gradients.resize(gradients.size() + others);
  return gradients;
}

bool is_recorded(at::TensorList tensors) {
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

// ---- flatten
// -------------------------------------------------------------------------------------

struct Flatten : Function<Flatten> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, at::TensorList tensors, double scale,
                            Dtype dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["scale"] = scale;
    ctx->save_for_backward(shapes_of(tensors));
    return call_flatten(tensors, scale, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    return padded(call_unflatten(gradients[0].contiguous(), ctx->get_saved_variables(),
                                 ctx->saved_data["scale"].toDouble()),
                  2);
  }
};

at::Tensor flatten(at::TensorList tensors, double scale, Dtype dtype) {
  check_buffer_dtype("flatten", dtype);
  check_no_forward_gradient("flatten", "tensors", tensors);
  if (is_recorded(tensors)) {
    return Flatten::apply(tensors, scale, dtype);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_flatten(tensors, scale, dtype);
}

// ---- flatten_stats
// -------------------------------------------------------------------------------

struct FlattenStats : Function<FlattenStats> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, at::TensorList tensors, double scale,
                               Dtype dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["scale"] = scale;
    ctx->save_for_backward(tensors.vec());
    ctx->set_materialize_grads(false);
    auto [buffer, sum_of_squares, nonfinite_count] = call_flatten_stats(tensors, scale, dtype);
    return {buffer, sum_of_squares, nonfinite_count};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto tensors = ctx->get_saved_variables();
    const auto scale = ctx->saved_data["scale"].toDouble();
    variable_list results(tensors.size());
    if (gradients[0].defined()) {
      results = call_unflatten(gradients[0].contiguous(), tensors, scale);
    }
    if (gradients[1].defined()) {
      // d(sum (scale x)^2)/dx = 2 scale^2 x
      const auto factor = gradients[1] * (2.0 * scale * scale);
      for (size_t i = 0; i < tensors.size(); ++i) {
        const auto own = (factor * tensors[i]).to(tensors[i].scalar_type());
        results[i] = results[i].defined() ? results[i] + own : own;
      }
    }
    return padded(std::move(results), 2);
  }
};

Stats flatten_stats(at::TensorList tensors, double scale, Dtype dtype) {
  check_buffer_dtype("flatten_stats", dtype);
  check_no_forward_gradient("flatten_stats", "tensors", tensors);
  if (is_recorded(tensors)) {
    const auto outputs = FlattenStats::apply(tensors, scale, dtype);
    return {outputs[0], outputs[1], outputs[2]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_flatten_stats(tensors, scale, dtype);
}

// ---- unflatten
// -----------------------------------------------------------------------------------

struct Unflatten : Function<Unflatten> {
  static constexpr bool is_traceable = true;

  // In a type of its own, which autograd does not look into: `like` has no part in the graph.
  struct Like {
    at::TensorList tensors;
  };

  static variable_list forward(AutogradContext* ctx, const at::Tensor& buffer, Like like,
                               double scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["shape"] = buffer.sym_sizes();
    ctx->saved_data["dtype"] = static_cast<int64_t>(buffer.scalar_type());
    return call_unflatten(buffer, like.tensors, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto flat = call_flatten(gradients, ctx->saved_data["scale"].toDouble(),
                                   static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt()));
    return padded({flat.view_symint(ctx->saved_data["shape"].toSymIntVector())}, 2);
  }
};

variable_list unflatten(const at::Tensor& buffer, at::TensorList like, double scale) {
  check_no_forward_gradient("unflatten", "buffer", -1, buffer);
  if (is_recorded(buffer)) {
    return Unflatten::apply(buffer, Unflatten::Like{like}, scale);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_unflatten(buffer, like, scale);
}

TORCH_LIBRARY_IMPL(commhook, Autograd, m) {
  m.impl("flatten", flatten);
  m.impl("flatten_stats", flatten_stats);
  m.impl("unflatten", unflatten);
}

}  // namespace
}  // namespace commhook
