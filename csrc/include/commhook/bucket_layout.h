// The layout of a list of parameters' gradients in one flat buffer.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace commhook {

// Gradients follow each other without gaps, in the order of the parameters. A gradient takes its
// parameter's strides if the parameter is dense (channels_last, a transposed weight), so that
// memory is copied in its own order. Otherwise its strides are row-major.
class BucketLayout {
 public:
  explicit BucketLayout(const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) {
      offsets_.push_back(numel_);
      lengths_.push_back(parameter.numel());
      sizes_.push_back(parameter.sizes().vec());
      orders_.push_back(memory_order(parameter));
      strides_.push_back(strides_of(parameter, !orders_.back().empty()));
      permuted_ = permuted_ || !orders_.back().empty();
      numel_ += parameter.numel();
    }
  }

  int64_t numel() const { return numel_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }

  // The gradients as views of a flat buffer of numel() elements.
  std::vector<at::Tensor> views(const at::Tensor& buffer) const {
    TORCH_CHECK_VALUE(buffer.numel() == numel_ && buffer.is_contiguous(),
                      "BucketLayout: buffer must be contiguous, of ", numel_, " elements, got ",
                      buffer.numel());
    std::vector<at::Tensor> views;
    views.reserve(offsets_.size());
    for (size_t i = 0; i < offsets_.size(); ++i) {
      views.push_back(
          buffer.as_strided(sizes_[i], strides_[i], buffer.storage_offset() + offsets_[i]));
    }
    return views;
  }

  // The gradients, permuted so that their row-major order is the buffer's.
  std::vector<at::Tensor> in_memory_order(std::vector<at::Tensor> gradients) const {
    if (permuted_) {
      for (size_t i = 0; i < gradients.size(); ++i) {
        if (!orders_[i].empty()) {
          gradients[i] = gradients[i].permute(orders_[i]);
        }
      }
    }
    return gradients;
  }

  // The same for one gradient, without a layout.
  static at::Tensor in_memory_order(const at::Tensor& gradient, const at::Tensor& parameter) {
    const auto order = memory_order(parameter);
    return order.empty() ? gradient : gradient.permute(order);
  }

 private:
  // The permutation that makes a dense, permuted tensor contiguous; empty for all other tensors.
  static std::vector<int64_t> memory_order(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) {
      return {};
    }
    std::vector<int64_t> order(tensor.dim());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return std::pair(tensor.stride(a), tensor.size(a)) >
             std::pair(tensor.stride(b), tensor.size(b));
    });
    return tensor.permute(order).is_contiguous() ? order : std::vector<int64_t>();
  }

  static std::vector<int64_t> strides_of(const at::Tensor& parameter, bool permuted) {
    if (permuted || parameter.is_contiguous()) {
      return parameter.strides().vec();
    }
    std::vector<int64_t> strides(parameter.dim());
    int64_t step = 1;
    for (int64_t d = parameter.dim() - 1; d >= 0; --d) {
      strides[d] = step;
      step *= std::max<int64_t>(parameter.size(d), 1);
    }
    return strides;
  }

  int64_t numel_ = 0;
  bool permuted_ = false;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> lengths_;
  std::vector<std::vector<int64_t>> sizes_;
  std::vector<std::vector<int64_t>> strides_;
  std::vector<std::vector<int64_t>> orders_;
};

}  // namespace commhook
