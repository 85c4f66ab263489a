#include "runtime/reducer_bucket.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "commhook/huge_pages.h"
#include "ops/type_names.h"
#include "runtime/hook_result.h"
#include "runtime/unflatten.h"

namespace commhook {

ReducerBucket::ReducerBucket(std::vector<at::Tensor> parameters, bool is_sparse, bool as_views)
    : parameters_(std::move(parameters)), layout_(parameters_), is_sparse_(is_sparse) {
  TORCH_CHECK_VALUE(!parameters_.empty(), "ReducerBucket: parameters must not be empty");
  if (as_views && !is_sparse) {
    views_ = layout_.views(storage());
  }
}

const at::Tensor& ReducerBucket::storage() {
  const std::lock_guard lock(mutex_);
  if (!storage_.defined()) {
    const auto& like = parameters_.front();
    storage_ = at::empty({layout_.numel()},
                         at::TensorOptions().dtype(like.scalar_type()).device(like.device()));
    preferHugePages(storage_);
  }
  return storage_;
}

at::Tensor ReducerBucket::zeros(const at::Tensor& parameter) const {
  if (!is_sparse_) {
    return at::zeros_like(parameter);
  }
  auto value_sizes = parameter.sizes().vec();
  value_sizes[0] = 0;
  return at::sparse_coo_tensor(at::empty({1, 0}, parameter.options().dtype(at::kLong)),
                               at::empty(value_sizes, parameter.options()), parameter.sizes());
}

void ReducerBucket::take_gradients(std::optional<std::vector<at::Tensor>> others) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  if (others) {
    gradients = std::move(*others);
  } else {
    gradients.reserve(parameters_.size());
    for (const auto& parameter : parameters_) {
      const auto& gradient = parameter.grad();
      gradients.push_back(gradient.defined() ? gradient : zeros(parameter));
    }
  }
  const std::lock_guard lock(mutex_);
  gradients_.swap(gradients);
}

std::vector<at::Tensor> ReducerBucket::gradients() const {
  const std::lock_guard lock(mutex_);
  return gradients_;
}

void ReducerBucket::drop_gradients() {
  std::vector<at::Tensor> dropped;  // without the mutex
  const std::lock_guard lock(mutex_);
  dropped.swap(gradients_);
}

std::vector<at::Tensor> ReducerBucket::taken_gradients() const {
  auto gradients = this->gradients();
  TORCH_CHECK(!gradients.empty(),
              "GradBucket: the backward of this bucket is over; its gradients are there while the "
              "hook runs");
  return gradients;
}

std::vector<at::Tensor> ReducerBucket::ordered_gradients() const {
  return layout_.in_memory_order(taken_gradients());
}

at::Tensor ReducerBucket::gather(double scale) {
  const at::NoGradGuard no_grad;
  auto gradients = taken_gradients();
  at::Tensor buffer = storage();
  if (!views_.empty()) {
    return gather_views(gradients, scale);
  }
  if (!buffer.is_complex()) {
    return ops::flatten_out(layout_.in_memory_order(std::move(gradients)), scale, buffer);
  }
  at::_foreach_copy_(layout_.views(buffer), gradients);  // the operators take no complex tensors
  return scale == 1.0 ? buffer : buffer.mul_(scale);
}

at::Tensor ReducerBucket::flatten(double scale, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Tensor> out) const {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_TYPE(
      !out || !dtype || out->scalar_type() == *dtype, "flatten: dtype must be that of out, ",
      out ? dtype_name(out->scalar_type()) : "", ", got ", dtype ? dtype_name(*dtype) : "");
  return out ? ops::flatten_out(ordered_gradients(), scale, *out)
             : ops::flatten(ordered_gradients(), scale, dtype);
}

at::Tensor ReducerBucket::gather_views(const std::vector<at::Tensor>& gradients, double scale) {
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (size_t i = 0; i < views_.size(); ++i) {
    if (!is_same_memory(views_[i], gradients[i]) || views_[i].strides() != gradients[i].strides()) {
      to.push_back(views_[i]);
      from.push_back(gradients[i]);
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  return scale == 1.0 ? storage_ : storage_.mul_(scale);
}

void ReducerBucket::write(const at::Tensor& result, double scale) {
  const at::NoGradGuard no_grad;
  if (is_sparse_) {
    parameters_.front().mutable_grad() = scale == 1.0 ? result : result.mul(scale);
    return;
  }
  if (!views_.empty()) {
    const bool is_there = is_same_memory(result, storage_);
    if (is_there || result.is_complex()) {
      if (!is_there) {
        storage_.copy_(result);
      }
      if (scale != 1.0) {
        storage_.mul_(scale);
      }
    } else {
      unflatten_into(result, {storage_}, scale);
    }
    for (size_t i = 0; i < views_.size(); ++i) {
      auto& gradient = parameters_[i].mutable_grad();
      if (!gradient.is_same(views_[i])) {
        gradient = views_[i];
      }
    }
    return;
  }
  std::vector<at::Tensor> into;
  into.reserve(parameters_.size());
  for (const auto& parameter : parameters_) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {  // taken away since
      gradient = at::empty_like(parameter);
    }
    into.push_back(gradient);
  }
  if (result.is_complex()) {
    at::_foreach_copy_(into, layout_.views(result));
    if (scale != 1.0) {
      at::_foreach_mul_(into, scale);
    }
  } else {
    unflatten_into(result, layout_.in_memory_order(std::move(into)), scale);
  }
}

}  // namespace commhook
