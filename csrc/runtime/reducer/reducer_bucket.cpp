#include "runtime/reducer/reducer_bucket.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "commhook/huge_pages.h"
#include "ops/type_names.h"
#include "runtime/hooks/hook_result.h"
#include "runtime/hooks/unflatten.h"

namespace commhook {
namespace {

// Whether a gradient is exactly these elements of memory, in this order.
bool lies_there(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.layout() == at::kStrided && gradient.device() == view.device() &&
         is_same_memory(gradient, view) && gradient.sizes() == view.sizes() &&
         gradient.strides() == view.strides();
}

}  // namespace

ReducerBucket::ReducerBucket(std::vector<at::Tensor> parameters, bool is_sparse, bool as_views)
    : parameters_(std::move(parameters)),
      layout_(parameters_),
      is_sparse_(is_sparse),
      as_views_(as_views && !is_sparse) {
  TORCH_CHECK_VALUE(!parameters_.empty(), "ReducerBucket: parameters must not be empty");
}

std::unique_lock<std::mutex> ReducerBucket::locked() const {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock && PyGILState_Check()) {
    // The thread with the mutex may need the GIL to count a reference to a tensor.
    const pybind11::gil_scoped_release released;
    lock.lock();
  } else if (!lock) {
    lock.lock();
  }
  return lock;
}

at::Tensor ReducerBucket::allocate() const {
  const auto& like = parameters_.front();
  const c10::InferenceMode outside(false);  // so that later steps can write to it
  auto memory = at::empty({layout_.numel()},
                          at::TensorOptions().dtype(like.scalar_type()).device(like.device()));
  preferHugePages(memory);
  return memory;
}

at::Tensor ReducerBucket::storage() {
  const auto lock = locked();
  auto& storage = apart_ ? apart_storage_ : storage_;
  // A gradient that is a view of the storage can free it, as in
  // `p.grad.untyped_storage().resize_(0)`.
  if (!storage.defined() || storage.storage().nbytes() < storage.nbytes()) {
    storage = allocate();
    if (as_views_ && !apart_) {
      views_ = layout_.views(storage);
    }
  }
  return storage;
}

std::vector<at::Tensor> ReducerBucket::views() {
  storage();
  const auto lock = locked();
  return views_;
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

void ReducerBucket::take_gradients(std::optional<std::vector<at::Tensor>> others, bool apart) {
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
  const auto lock = locked();
  gradients_.swap(gradients);
  apart_ = apart && as_views_;
}

std::vector<at::Tensor> ReducerBucket::gradients() const {
  const auto lock = locked();
  return gradients_;
}

void ReducerBucket::drop_gradients() {
  std::vector<at::Tensor> dropped;  // freed after the mutex is released
  const auto lock = locked();
  dropped.swap(gradients_);
}

std::vector<at::Tensor> ReducerBucket::taken_gradients() const {
  auto gradients = this->gradients();
  TORCH_CHECK(!gradients.empty(),
              "GradBucket: the backward of this bucket has ended; its gradients exist only while "
              "the hook runs");
  return gradients;
}

std::vector<at::Tensor> ReducerBucket::ordered_gradients() const {
  return layout_.in_memory_order(taken_gradients());
}

at::Tensor ReducerBucket::gather(double scale) {
  const at::NoGradGuard no_grad;
  auto gradients = taken_gradients();
  if (as_views_ && !apart_) {
    return gather_views(gradients, scale);
  }
  at::Tensor buffer = storage();
  if (!buffer.is_complex()) {
    return ops::flatten_out(layout_.in_memory_order(std::move(gradients)), scale, buffer);
  }
  at::_foreach_copy_(layout_.views(buffer), gradients);  // the operators accept no complex tensors
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
  const auto buffer = storage();
  const auto views = this->views();
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  for (size_t i = 0; i < views.size(); ++i) {
    if (!lies_there(gradients[i], views[i])) {
      to.push_back(views[i]);
      from.push_back(gradients[i]);
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  return scale == 1.0 ? buffer : buffer.mul_(scale);
}

void ReducerBucket::write(const at::Tensor& result, double scale,
                          std::optional<std::vector<at::Tensor>> into) {
  const at::NoGradGuard no_grad;
  if (is_sparse_) {
    parameters_.front().mutable_grad() = scale == 1.0 ? result : result.mul(scale);
    return;
  }
  if (as_views_ && !into) {
    const auto buffer = storage();
    const bool is_there = is_same_memory(result, buffer);
    if (is_there || result.is_complex()) {
      if (!is_there) {
        buffer.copy_(result);
      }
      if (scale != 1.0) {
        buffer.mul_(scale);
      }
    } else {
      unflatten_into(result, {buffer}, scale);
    }
    const auto views = this->views();
    for (size_t i = 0; i < views.size(); ++i) {
      auto& gradient = parameters_[i].mutable_grad();
      if (!gradient.defined() || !lies_there(gradient, views[i])) {
        // A separate tensor, since moving the gradient (`p.grad.data = ...`) must not move the
        // view.
        gradient = views[i].detach();
      }
    }
    return;
  }
  if (!into) {
    into.emplace().reserve(parameters_.size());
    for (const auto& parameter : parameters_) {
      auto& gradient = parameter.mutable_grad();
      if (!gradient.defined()) {  // removed in the meantime
        gradient = at::empty_like(parameter);
      }
      into->push_back(gradient);
    }
  }
  if (result.is_complex()) {
    at::_foreach_copy_(*into, layout_.views(result));
    if (scale != 1.0) {
      at::_foreach_mul_(*into, scale);
    }
  } else {
    unflatten_into(result, layout_.in_memory_order(std::move(*into)), scale);
  }
}

}  // namespace commhook
