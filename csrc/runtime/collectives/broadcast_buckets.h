// Groups tensors into broadcasts.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace commhook {

// The dimension along which a large tensor is cut into pieces, which are sent one after another,
// and their length. A piece has 32 MiB, or one row if a row is larger.
struct Cut {
  int64_t dim;
  int64_t length;
};

// None if the tensor stays whole. Like all functions here it gives the same on all ranks, and in
// eager and compiled code, so that these can run one broadcast together.
std::optional<Cut> cut_of(c10::IntArrayRef sizes, int64_t element_size);

// Tensors, or pieces of tensors, in one broadcast.
struct Bucket {
  std::vector<size_t> indices;
  int64_t bytes = 0;
};

// Puts tensors of these sizes, in bytes, into buckets of at most `buffer_size` bytes. A bucket
// holds one kind (a dtype on a device). Buckets are in the order of their first tensors; empty
// tensors are left out.
std::vector<Bucket> make_buckets(const std::vector<int64_t>& bytes,
                                 const std::vector<int64_t>& kinds, int64_t buffer_size);

}  // namespace commhook
