// Which tensors travel together.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace commhook {

// The dimension along which a large tensor is cut into pieces that travel one after another, and
// how long these are. Pieces are of 32 MiB, or of one row where that is larger.
struct Cut {
  int64_t dim;
  int64_t length;
};

// None where the tensor stays whole. The same on all ranks, as all here, and for compiled code as
// for eager, so that these can meet.
std::optional<Cut> cut_of(c10::IntArrayRef sizes, int64_t element_size);

// Tensors, or pieces of them, that travel in one broadcast.
struct Bucket {
  std::vector<size_t> indices;
  int64_t bytes = 0;
};

// How tensors of these sizes, in bytes, are put into buckets of at most `buffer_size` bytes, each
// of one kind (a dtype on a device), in the order of their first tensors; empty ones are left out.
std::vector<Bucket> make_buckets(const std::vector<int64_t>& bytes,
                                 const std::vector<int64_t>& kinds, int64_t buffer_size);

}  // namespace commhook
