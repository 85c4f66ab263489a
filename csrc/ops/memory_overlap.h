// Finds tensors that share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace commhook {

// The number of elements from a tensor's first to its last, both included.
int64_t span_of(const at::Tensor& tensor);

// The bytes [begin, end) between a tensor's first and last element.
struct Extent {
  std::uintptr_t begin;
  std::uintptr_t end;
  int64_t index;  // the tensor's index in its list
};

Extent extent_of(const at::Tensor& tensor, int64_t index);

// Whether two extents have a byte in common.
bool overlap(const Extent& a, const Extent& b);

// Whether two different indices of the tensor may refer to one element.
bool overlaps_itself(const at::Tensor& tensor);

// The indices of two tensors that share an element, the smaller first; none if no two do, even if
// they interleave. `extents` belong to the tensors, in their order; no tensor may overlap itself.
std::optional<std::pair<int64_t, int64_t>> find_overlap(at::TensorList tensors,
                                                        std::vector<Extent> extents);

}  // namespace commhook
