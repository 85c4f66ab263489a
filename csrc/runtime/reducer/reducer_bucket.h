// A bucket of this library's reducer over the steps: its parameters, and the way of their gradients
// to a hook and back. Works without the GIL.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "commhook/grad_bucket.h"

namespace commhook {

class ReducerBucket : public GradientSource {
 public:
  // With `as_views`, gradients stay in the bucket's memory as views. A sparse bucket holds one
  // parameter.
  ReducerBucket(std::vector<at::Tensor> parameters, bool is_sparse, bool as_views);

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  const BucketLayout& layout() const override { return layout_; }
  bool is_sparse() const { return is_sparse_; }

  // Takes the parameters' current gradients, with zeros for those without one; or takes `others`.
  // With `apart`, gather() does not write to the memory that gradients are views of, since some of
  // them may have to keep their values.
  void take_gradients(std::optional<std::vector<at::Tensor>> others = std::nullopt,
                      bool apart = false);
  std::vector<at::Tensor> gradients() const;
  void drop_gradients();

  std::vector<at::Tensor> ordered_gradients() const override;
  at::Tensor gather(double scale) override;
  // Gathers the gradients into another flat tensor, or into `out`.
  at::Tensor flatten(double scale, std::optional<at::ScalarType> dtype,
                     std::optional<at::Tensor> out) const;

  // Writes a result into the gradients of all parameters, scaled and cast. A parameter without a
  // gradient gets one. With `as_views`, gradients are views of the bucket from then on. Writes to
  // `into` instead, if given, and not for a sparse bucket.
  void write(const at::Tensor& result, double scale = 1.0,
             std::optional<std::vector<at::Tensor>> into = std::nullopt);

 private:
  at::Tensor zeros(const at::Tensor& parameter) const;
  at::Tensor gather_views(const std::vector<at::Tensor>& gradients, double scale);
  std::vector<at::Tensor> taken_gradients() const;  // throws if there are none
  // The memory of the bucket's buffer, the same in all steps.
  at::Tensor storage();
  at::Tensor allocate() const;
  // The gradients' places in the storage.
  std::vector<at::Tensor> views();
  // Locks the mutex. A thread with the GIL releases it while it waits.
  std::unique_lock<std::mutex> locked() const;

  const std::vector<at::Tensor> parameters_;
  const BucketLayout layout_;
  const bool is_sparse_;
  const bool as_views_;
  // So that a forbidden backward in another thread does not crash.
  mutable std::mutex mutex_;
  at::Tensor storage_;
  at::Tensor apart_storage_;  // for steps that do not change storage_
  // Of storage_; gradients are other tensors, which share their memory.
  std::vector<at::Tensor> views_;
  std::vector<at::Tensor> gradients_;
  bool apart_ = false;
};

}  // namespace commhook
