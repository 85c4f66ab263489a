// Which tensors travel together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace commhook {

// Tensors that travel in one broadcast.
struct Bucket {
  std::vector<size_t> indices;
  int64_t bytes = 0;
};

// How tensors of these sizes, in bytes, are put into buckets of at most `buffer_size` bytes, each
// of one kind (a dtype on a device), in the order of their first tensors; empty tensors are left
// out. The same on all ranks, and for compiled code as for eager, so that these can meet.
std::vector<Bucket> make_buckets(const std::vector<int64_t>& bytes,
                                 const std::vector<int64_t>& kinds, int64_t buffer_size);

}  // namespace commhook
