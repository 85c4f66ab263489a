// One of our reducer's buckets, over the steps: its parameters, and their gradients on the way to a
// hook and back. Works without the GIL.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "commhook/grad_bucket.h"

namespace commhook {

class ReducerBucket : public GradientSource {
 public:
  // With `as_views`, gradients stay in the bucket's memory, as views of it. A sparse bucket holds
  // one parameter.
  ReducerBucket(std::vector<at::Tensor> parameters, bool is_sparse, bool as_views);

  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  const BucketLayout& layout() const override { return layout_; }
  bool is_sparse() const { return is_sparse_; }

  // The gradients that the parameters have now, zeros for those that have none; or others.
  void take_gradients(std::optional<std::vector<at::Tensor>> others = std::nullopt);
  std::vector<at::Tensor> gradients() const;
  void drop_gradients();

  std::vector<at::Tensor> ordered_gradients() const override;
  at::Tensor gather(double scale) override;
  // In another flat tensor, or in `out`.
  at::Tensor flatten(double scale, std::optional<at::ScalarType> dtype,
                     std::optional<at::Tensor> out) const;

  // Brings a result into the gradients of all parameters, scaled and cast on the way; what a
  // backward has left without one gets one.
  void write(const at::Tensor& result, double scale = 1.0);

 private:
  at::Tensor zeros(const at::Tensor& parameter) const;
  at::Tensor gather_views(const std::vector<at::Tensor>& gradients, double scale);
  std::vector<at::Tensor> taken_gradients() const;  // throws where there are none
  // The memory of the bucket's buffer, which stays from step to step.
  const at::Tensor& storage();

  const std::vector<at::Tensor> parameters_;
  const BucketLayout layout_;
  const bool is_sparse_;
  // A backward in another thread, which must not be, must not crash.
  mutable std::mutex mutex_;
  at::Tensor storage_;
  std::vector<at::Tensor> views_;  // of the storage, where gradients are to stay there
  std::vector<at::Tensor> gradients_;
};

}  // namespace commhook
