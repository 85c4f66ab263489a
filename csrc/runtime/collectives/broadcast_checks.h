// The checks of broadcast_coalesced, before anything is sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace commhook {

inline constexpr const char* kBroadcastCoalesced = "broadcast_coalesced";

// No tensor is part of a graph that is being recorded.
void check_broadcast_not_recorded(at::TensorList tensors);

// The other checks: tensors are dense and share memory neither with each other nor between their
// own elements; sizes and ranks are in range. `size`: the group's.
void check_broadcast_coalesced(at::TensorList tensors, int64_t buffer_size, int64_t rank,
                               int64_t size);

}  // namespace commhook
