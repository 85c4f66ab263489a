// Persistent buffers of a hook.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <iterator>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "commhook/grad_bucket.h"
#include "commhook/huge_pages.h"

namespace commhook {

// One flat buffer for each bucket that a hook has seen. DDP rebuilds its buckets after the first
// step, and one hook may serve several models, so an index does not identify a bucket: its first
// parameter does. A buffer is freed when its parameters are gone, or belong to another bucket.
class Workspaces {
 public:
  // As long as the bucket, of `dtype`, on its device. Holds the last step's contents, or arbitrary
  // values.
  at::Tensor get(const GradBucket& bucket, at::ScalarType dtype) {
    const std::lock_guard lock(mutex_);  // two models may share one hook
    const auto& parameters = bucket.getParameters();
    auto found = buffers_.find(key(parameters[0]));
    if (found != buffers_.end() && found->second.fits(bucket, dtype)) {
      return found->second.buffer;
    }
    for (auto it = buffers_.begin(); it != buffers_.end();) {
      it = it->second.parameter.expired() ? buffers_.erase(it) : std::next(it);
    }
    for (const auto& parameter : parameters) {
      buffers_.erase(key(parameter));
    }
    const c10::InferenceMode outside(false);  // so that later steps can write to it
    at::Tensor buffer =
        at::empty({bucket.numel()}, at::TensorOptions().dtype(dtype).device(bucket.device()));
    preferHugePages(buffer);
    buffers_.emplace(key(parameters[0]), Held{Parameter(parameters[0].getIntrusivePtr()), buffer});
    return buffer;
  }

  size_t size() const {
    const std::lock_guard lock(mutex_);
    return buffers_.size();
  }

 private:
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Held {
    Parameter parameter;
    at::Tensor buffer;
    bool fits(const GradBucket& bucket, at::ScalarType dtype) const {
      return !parameter.expired() && buffer.numel() == bucket.numel() &&
             buffer.scalar_type() == dtype && buffer.device() == bucket.device();
    }
  };
  static const c10::TensorImpl* key(const at::Tensor& parameter) {
    return parameter.unsafeGetTensorImpl();
  }

  mutable std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Held> buffers_;
};

}  // namespace commhook
