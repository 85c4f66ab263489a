// Constructs PyTorch's GradBucket, which has no constructor in Python.
#pragma once

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

namespace commhook {

// A torch.distributed.GradBucket that shares `buffer`.
std::shared_ptr<c10d::GradBucket> make_grad_bucket(int64_t index, int64_t bucket_count,
                                                   const at::Tensor& buffer,
                                                   const std::vector<at::Tensor>& parameters,
                                                   std::optional<at::Tensor> sparse_grad_indices);

// The number of buckets, from a private member of PyTorch's bucket.
int64_t bucket_count(const c10d::GradBucket& bucket);

}  // namespace commhook
