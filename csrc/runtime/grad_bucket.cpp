#include "runtime/grad_bucket.h"

namespace commhook {
namespace {

// The one way that C++ has to read a member that a class keeps to itself: access is not checked in
// an explicit instantiation.
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
                                                   const std::vector<int64_t>& offsets,
                                                   const std::vector<int64_t>& lengths,
                                                   const std::vector<at::Tensor>& parameters,
                                                   std::optional<at::Tensor> sparse_grad_indices) {
  // The bucket keeps the parameters, and these keep the sizes that it only refers to.
  std::vector<c10::IntArrayRef> sizes;
  sizes.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    sizes.push_back(parameter.sizes());
  }
  return std::make_shared<c10d::GradBucket>(
      static_cast<size_t>(index), static_cast<size_t>(bucket_count), buffer,
      std::vector<size_t>(offsets.begin(), offsets.end()),
      std::vector<size_t>(lengths.begin(), lengths.end()), std::move(sizes), parameters,
      std::move(sparse_grad_indices));
}

}  // namespace commhook
