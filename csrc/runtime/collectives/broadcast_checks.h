// What broadcast_coalesced refuses, before anything is sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace commhook {

inline constexpr const char* kBroadcastCoalesced = "broadcast_coalesced";

// No tensor is part of a graph that is being recorded.
void check_broadcast_not_recorded(at::TensorList tensors);

// Beyond that: the tensors are dense, with memory that they share neither with each other nor among
// their own elements, and sizes and ranks are in range. `size`: of the group.
void check_broadcast_coalesced(at::TensorList tensors, int64_t buffer_size, int64_t rank,
                               int64_t size);

}  // namespace commhook
