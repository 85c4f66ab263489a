// Collectives for hooks in C++. They count the bytes that they send.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <cmath>
#include <utility>
#include <vector>

#include "commhook/grad_bucket.h"

namespace commhook {

// A completed Future.
inline c10::intrusive_ptr<c10::ivalue::Future> completedFuture(at::Tensor tensor) {
  std::vector<at::Device> devices;
  if (tensor.device().has_index()) {
    devices.push_back(tensor.device());
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
  future->markCompleted(std::move(tensor));
  return future;
}

// Sums a tensor over the bucket's ranks in place. The tensor is contiguous, or sparse if the
// backend supports that. The Future holds the tensor, or a list with it. Counts the bytes of a
// ring: 2 (W - 1) / W times the tensor's.
inline c10::intrusive_ptr<c10::ivalue::Future> allReduce(GradBucket& bucket, at::Tensor tensor) {
  const auto& group = bucket.getProcessGroup();
  const double ranks = group->getSize();
  auto bytes = tensor.numel() * tensor.element_size();
  if (tensor.layout() == at::kSparse) {
    bytes = tensor._values().nbytes() + tensor._indices().nbytes();
  }
  bucket.addBytesSent(std::llround(2 * static_cast<double>(bytes) * (ranks - 1) / ranks));
  if (ranks == 1) {
    return completedFuture(std::move(tensor));
  }
  const bool complex = tensor.is_complex();
  std::vector<at::Tensor> tensors{complex ? at::view_as_real(tensor) : tensor};
  const auto work = group->allreduce(tensors);
  TORCH_CHECK(work, "allReduce: the process group returned no Work");
  auto future = work->getFuture();
  TORCH_CHECK(future, "allReduce: the process group's Work has no Future");
  if (!tensor.device().is_cpu() && future->devices().empty()) {
    // A group without device support, such as Gloo, completes when the host has done its part,
    // perhaps before copies to the device have ended. wait() makes streams wait for these copies.
    work->wait();
    return completedFuture(std::move(tensor));
  }
  if (!complex) {
    return future;
  }
  return future->then(
      [tensor = std::move(tensor)](c10::ivalue::Future& done) {
        done.value();  // throws the error of a failed collective
        return c10::IValue(tensor);
      },
      c10::TensorType::get());
}

}  // namespace commhook
