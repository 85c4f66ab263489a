// Many tensors from one rank to all others, in few broadcasts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace commhook {

// Writes the contents that `tensors` have on rank `rank` of the group into those of all its ranks.
// Tensors of one dtype and device travel together, in buckets of at most `buffer_size` bytes;
// larger ones alone, in pieces where they are very large; no more than two broadcasts are in
// flight. Waits for all of them, as the group's Work does: on CUDA the current stream does. What a
// broadcast throws is thrown once nothing is in flight any more. On any thread; needs no GIL.
//
// Where a tensor or a mode overrides the dispatcher, this is the operator of the same name.
void broadcast_coalesced(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         at::TensorList tensors, int64_t buffer_size, int64_t rank);

}  // namespace commhook
