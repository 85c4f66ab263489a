// Broadcasts many tensors in few messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace commhook {

// Copies the contents of `tensors` from rank `rank` to all ranks of the group. Tensors of one dtype
// and device share buckets of at most `buffer_size` bytes. A larger tensor is sent alone, and a
// very large one in pieces. At most two broadcasts are in flight. Waits for all of them as the
// group's Work does: on CUDA the current stream waits. Throws the error of a broadcast once nothing
// is in flight. Runs on any thread, and needs no GIL.
//
// If a tensor or a mode overrides the dispatcher, this calls the operator of the same name.
void broadcast_coalesced(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         at::TensorList tensors, int64_t buffer_size, int64_t rank);

}  // namespace commhook
