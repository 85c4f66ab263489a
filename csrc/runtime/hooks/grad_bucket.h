// PyTorch's GradBucket, which has no constructor in Python.
#pragma once

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

namespace commhook {

// A torch.distributed.GradBucket over `buffer`, which it shares.
std::shared_ptr<c10d::GradBucket> make_grad_bucket(int64_t index, int64_t bucket_count,
                                                   const at::Tensor& buffer,
                                                   const std::vector<at::Tensor>& parameters,
                                                   std::optional<at::Tensor> sparse_grad_indices);

// How many buckets there are, which PyTorch's bucket knows and does not tell.
int64_t bucket_count(const c10d::GradBucket& bucket);

}  // namespace commhook
