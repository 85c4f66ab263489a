#include "runtime/collectives/broadcast_buckets.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>
#include <utility>

namespace commhook {
namespace {

// A tensor of at least kAloneBytes fills a bucket alone, whatever the buffers' size. It is sent
// from its own memory, which saves two copies for one more broadcast. No bucket exceeds
// kBucketBytes, so that copies of one bucket overlap the transfer of another, and buffers stay in
// the caches.
constexpr int64_t kAloneBytes = int64_t{1} << 20;
constexpr int64_t kBucketBytes = int64_t{8} << 20;

// A tensor that is not contiguous passes through buffers of this size, however large it is. Gloo is
// slower with smaller pieces.
constexpr int64_t kPieceBytes = int64_t{32} << 20;

}  // namespace

std::optional<Cut> cut_of(c10::IntArrayRef sizes, int64_t element_size) {
  const auto bytes = c10::multiply_integers(sizes) * element_size;
  if (bytes <= kPieceBytes) {
    return std::nullopt;
  }
  int64_t dim = 0;
  while (sizes[dim] == 1) {
    ++dim;
  }
  return Cut{dim, std::max<int64_t>(1, kPieceBytes / (bytes / sizes[dim]))};
}

std::vector<Bucket> make_buckets(const std::vector<int64_t>& bytes,
                                 const std::vector<int64_t>& kinds, int64_t buffer_size) {
  const auto limit = std::min(buffer_size, kBucketBytes);
  const auto alone = std::min(limit, kAloneBytes);
  std::vector<Bucket> buckets;
  std::map<int64_t, Bucket> open;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == 0) {
      continue;
    }
    if (bytes[i] >= alone) {
      buckets.push_back({{i}, bytes[i]});
      continue;
    }
    auto& bucket = open[kinds[i]];
    if (bucket.bytes + bytes[i] > limit) {
      buckets.push_back(std::exchange(bucket, {}));
    }
    bucket.indices.push_back(i);
    bucket.bytes += bytes[i];
  }
  for (auto& [kind, bucket] : open) {
    buckets.push_back(std::move(bucket));
  }
  std::sort(buckets.begin(), buckets.end(),
            [](const Bucket& a, const Bucket& b) { return a.indices.front() < b.indices.front(); });
  return buckets;
}

}  // namespace commhook
