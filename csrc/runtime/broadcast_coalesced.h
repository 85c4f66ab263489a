// Many tensors from one rank to all others, in few broadcasts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace commhook {

// Writes the contents that `tensors` have on rank `rank` of the group into those of all its ranks.
// Tensors of one dtype and device travel together, in buckets of at most `buffer_size` bytes, or
// alone where one is larger; no more than two broadcasts are in flight. Waits for all of them, as
// the group's Work does: on CUDA the current stream does. What a broadcast throws is thrown once
// nothing is in flight any more. On any thread; needs no GIL.
//
// Where a tensor or a mode overrides the dispatcher, this is the operator of the same name.
void broadcast_coalesced(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         at::TensorList tensors, int64_t buffer_size, int64_t rank);

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
