#include "runtime/hooks/grad_bucket.h"

#include "commhook/grad_bucket.h"

namespace commhook {
namespace {

// Reads a private member of a class: C++ does not check access in an explicit instantiation.
template <auto kMember>
struct ReadBucketCount {
  friend size_t read_bucket_count(const c10d::GradBucket& bucket) { return bucket.*kMember; }
};
size_t read_bucket_count(const c10d::GradBucket& bucket);
template struct ReadBucketCount<&c10d::GradBucket::bucket_count_>;

}  // namespace

int64_t bucket_count(const c10d::GradBucket& bucket) {
  return static_cast<int64_t>(read_bucket_count(bucket));
}

std::shared_ptr<c10d::GradBucket> make_grad_bucket(int64_t index, int64_t bucket_count,
                                                   const at::Tensor& buffer,
                                                   const std::vector<at::Tensor>& parameters,
                                                   std::optional<at::Tensor> sparse_grad_indices) {
  GradBucket bucket(static_cast<size_t>(index), static_cast<size_t>(bucket_count), parameters,
                    buffer, nullptr, std::move(sparse_grad_indices));
  return std::make_shared<c10d::GradBucket>(bucket.torchBucket());
}

}  // namespace commhook
