// Checks that a tensor has memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/autograd_checks.h"
#include "ops/memory_overlap.h"

namespace commhook {

// A storage can be resized under its tensors, so that memory to read or write may be missing.
inline void check_memory(const char* op, const char* argument, int64_t index,
                         const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) {
    return;
  }
  const auto bytes = (tensor.storage_offset() + span_of(tensor)) * tensor.element_size();
  TORCH_CHECK_VALUE(static_cast<size_t>(bytes) <= tensor.storage().nbytes(), op, ": ",
                    argument_name(argument, index), " must have a storage of ", bytes,
                    " bytes or more, got one of ", tensor.storage().nbytes());
}

}  // namespace commhook
