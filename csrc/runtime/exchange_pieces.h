// Exchanges over Gloo that use both directions of a link at once.
#pragma once

#include <ATen/core/ivalue.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace commhook {

// Sends `inputs[r]` to each rank r, and gets `outputs[r]` from it: flat bytes on the CPU, in pieces
// that end at `ends`, each an all-to-all of its own. What goes to this rank itself is for the
// caller to copy. A Future of `result`, which is there once all pieces are; where one has failed,
// of its error. `ends` ascend, to the length of the longest message at least, and are the same on
// all ranks. Called without the GIL.
c10::intrusive_ptr<c10::ivalue::Future> exchange_pieces(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& outputs, const std::vector<int64_t>& ends,
    const at::Tensor& result);

}  // namespace commhook
