// The bucket of gradients that a communication hook receives.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "commhook/bucket_layout.h"
#include "commhook/ops.h"
#include "commhook/version.h"

namespace commhook {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Gradients that have not been gathered into a bucket's buffer yet.
class COMMHOOK_EXPORT GradientSource {
 public:
  virtual ~GradientSource() = default;
  virtual const std::vector<at::Tensor>& parameters() const = 0;
  virtual const BucketLayout& layout() const = 0;
  // The gradients, permuted so that their row-major order is the buffer's.
  virtual std::vector<at::Tensor> ordered_gradients() const = 0;
  // Copies all gradients into the bucket's own buffer, scaled.
  virtual at::Tensor gather(double scale) = 0;
};

// Has the methods of c10d::GradBucket, and more. It lives as long as the hook's call; the hook may
// keep the methods' results. No method needs the GIL.
class COMMHOOK_EXPORT GradBucket {
 public:
  // For an existing buffer: flat and contiguous, or a sparse gradient.
  GradBucket(size_t index, size_t count, std::vector<at::Tensor> parameters, at::Tensor buffer,
             ProcessGroupPtr group, std::optional<at::Tensor> sparse_grad_indices = std::nullopt)
      : index_(index),
        count_(count),
        parameters_(std::move(parameters)),
        buffer_(std::move(buffer)),
        group_(std::move(group)),
        sparse_grad_indices_(std::move(sparse_grad_indices)) {}

  // Gathers its gradients on first use. Keeps a reference to the source.
  GradBucket(size_t index, size_t count, GradientSource& source, ProcessGroupPtr group)
      : index_(index),
        count_(count),
        parameters_(source.parameters()),
        source_(&source),
        group_(std::move(group)) {}

  // Wraps PyTorch's bucket and keeps a reference to it.
  GradBucket(c10d::GradBucket& bucket, size_t count, ProcessGroupPtr group)
      : GradBucket(bucket.getIndex(), count, bucket.getParameters(), bucket.getBuffer(),
                   std::move(group), bucket.getSparseGradIndices()) {
    torch_bucket_ = &bucket;
  }

  GradBucket(const GradBucket&) = delete;
  GradBucket& operator=(const GradBucket&) = delete;

  // ---- methods of c10d::GradBucket --------------------------------------------------------------

  // Counts from 0. Buckets come in this order, and bucket 0 holds the last layers.
  size_t getIndex() const { return index_; }

  // All gradients, of shape [elements]; for a sparse bucket the gradient itself.
  const at::Tensor& getBuffer() { return getBufferRef(); }
  at::Tensor& getBufferRef() {
    if (!buffer_.defined()) {
      buffer_ = source().gather(1.0);
    }
    return buffer_;
  }
  // Throws ValueError for a buffer that does not fit.
  void setBuffer(at::Tensor buffer) {
    TORCH_CHECK_VALUE(
        buffer.defined() && buffer.layout() == (isSparse() ? at::kSparse : at::kStrided) &&
            buffer.numel() == numel() && buffer.scalar_type() == dtype() &&
            buffer.device() == device() && (isSparse() || buffer.is_contiguous()),
        "GradBucket.setBuffer: buffer must be contiguous, of ", numel(), " elements, ", dtype(),
        " on ", device(), ", got ",
        buffer.defined()
            ? c10::str(buffer.numel(), " elements, ", buffer.toString(), " on ", buffer.device())
            : "an undefined tensor");
    buffer_ = std::move(buffer);
  }

  // The gradients as views of the buffer, with their parameters' shapes and strides.
  std::vector<at::Tensor> getGradients() {
    const auto& buffer = getBuffer();
    if (isSparse()) {
      return {buffer};
    }
    // DDP stores complex gradients as pairs of real numbers.
    const bool pairs = parameters_.front().is_complex() && !buffer.is_complex();
    return layout().views(pairs ? at::view_as_complex(buffer.view({-1, 2})) : buffer);
  }

  const std::vector<at::Tensor>& getParameters() const { return parameters_; }
  bool isLast() const { return index_ + 1 == count_; }

  // The indices of a sparse gradient, if they are known beforehand.
  std::optional<at::Tensor>& getSparseGradIndices() { return sparse_grad_indices_; }

  // ---- further methods --------------------------------------------------------------------------

  size_t getBucketCount() const { return count_; }

  // The ranks to average over; in place of a group of Gloo, one of the library. Not null.
  const ProcessGroupPtr& getProcessGroup() const { return group_; }

  // Properties of the buffer; these do not gather it. DDP stores complex gradients as pairs of real
  // numbers.
  at::ScalarType dtype() const { return like().scalar_type(); }
  at::Device device() const { return like().device(); }
  int64_t numel() const { return buffer_.defined() ? buffer_.numel() : source().layout().numel(); }
  bool isSparse() const { return buffer_.defined() && buffer_.layout() != at::kStrided; }

  // The buffer, multiplied by `scale` in place. A call before getBuffer() saves a pass over memory
  // if the gradients have not been gathered.
  at::Tensor scaledBuffer(double scale) {
    if (!buffer_.defined()) {
      buffer_ = source().gather(scale);
    } else if (scale != 1.0) {
      buffer_.mul_(scale);
    }
    return buffer_;
  }

  // The gradients in another flat tensor, scaled in float32 (float64 for float64) and then cast, in
  // one pass over memory. The bucket's own buffer does not change. Only for dense and real buckets.
  at::Tensor flatten(double scale, at::ScalarType dtype) {
    return ops::flatten(gradientsInOrder(), scale, dtype);
  }
  // The same into a flat tensor, with that tensor's dtype.
  at::Tensor& flattenInto(double scale, at::Tensor& out) {
    return ops::flatten_out(gradientsInOrder(), scale, out);
  }

  // Counts the bytes that this rank sends for the bucket, for HookHandle.stats(). The traffic of a
  // hook that never calls this is unknown. allReduce() calls it.
  void addBytesSent(int64_t bytes) { bytes_sent_ = bytes_sent_.value_or(0) + bytes; }
  std::optional<int64_t> getBytesSent() const { return bytes_sent_; }

  // A PyTorch bucket over the same buffer and parameters. Its getGradients() ignores strides, so it
  // returns the gradients of permuted parameters permuted.
  c10d::GradBucket& torchBucket() {
    if (torch_bucket_ == nullptr) {
      made_ = std::make_unique<c10d::GradBucket>(makeTorchBucket());
      torch_bucket_ = made_.get();
    }
    return *torch_bucket_;
  }

 private:
  const at::Tensor& like() const { return buffer_.defined() ? buffer_ : parameters_.front(); }

  GradientSource& source() const {
    TORCH_CHECK(source_ != nullptr, "GradBucket: the buffer was moved out of this bucket");
    return *source_;
  }

  const BucketLayout& layout() {
    if (source_ != nullptr) {
      return source_->layout();
    }
    if (!layout_) {
      layout_.emplace(parameters_);
    }
    return *layout_;
  }

  std::vector<at::Tensor> gradientsInOrder() const {
    return buffer_.defined() ? std::vector{buffer_} : source().ordered_gradients();
  }

  c10d::GradBucket makeTorchBucket() {
    std::vector<size_t> offsets;
    std::vector<size_t> lengths;
    if (!isSparse()) {
      offsets.assign(layout().offsets().begin(), layout().offsets().end());
      lengths.assign(layout().lengths().begin(), layout().lengths().end());
    }
    // PyTorch's bucket only refers to the sizes; the parameters own them, and the bucket keeps
    // those.
    std::vector<c10::IntArrayRef> sizes;
    for (const auto& parameter : parameters_) {
      sizes.push_back(parameter.sizes());
    }
    return c10d::GradBucket(index_, count_, getBuffer(), std::move(offsets), std::move(lengths),
                            std::move(sizes), parameters_, sparse_grad_indices_);
  }

  const size_t index_;
  const size_t count_;
  const std::vector<at::Tensor> parameters_;
  GradientSource* const source_ = nullptr;
  at::Tensor buffer_;  // undefined until the gradients are gathered
  const ProcessGroupPtr group_;
  std::optional<at::Tensor> sparse_grad_indices_;
  std::optional<BucketLayout> layout_;
  std::optional<int64_t> bytes_sent_;
  c10d::GradBucket* torch_bucket_ = nullptr;
  std::unique_ptr<c10d::GradBucket> made_;
};

}  // namespace commhook
