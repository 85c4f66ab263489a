// Operators on memory that the ranks of one machine share: their checks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>

#include "ops/symmetric/signals.h"

namespace commhook::symmetric {

// Fills a message that could not be made: the parameters of its blocks are then NaN.
constexpr int kNoMessage = 0xff;

// Each throws an error that names the operator, the argument, its contract and the value.

// Checks the number of tensors, one for each rank: at least `least`, at most kMaxRanks.
C10_EXPORT void check_ranks(const char* op, const char* argument, int64_t ranks, int64_t least);
// failed: one int64 on the device, or none.
C10_EXPORT void check_failed(const char* op, const std::optional<at::Tensor>& failed,
                             at::Device device);
// controls: one for each rank, flat int64 with control_words(ranks) elements, on one device,
// sharing no memory. rank: the caller's index among them. Returns the timeout in nanoseconds.
C10_EXPORT int64_t check_barrier(at::TensorList controls, int64_t rank, double timeout);
// shards: one for each rank, contiguous, with a multiple of 4 bytes. message: as many bytes as all
// shards together; it shares no memory with them.
C10_EXPORT void check_gather(at::TensorList shards, const at::Tensor& message,
                             const std::optional<at::Tensor>& failed);

// Waits for the device if that is not the CPU.
C10_EXPORT bool has_failed(const std::optional<at::Tensor>& failed);

}  // namespace commhook::symmetric
