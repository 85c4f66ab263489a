// Operators on memory that the ranks of one machine share: the checks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>

#include "ops/symmetric/signals.h"

namespace commhook::symmetric {

// Of each byte of a message that could not be made: the parameters of its blocks are then NaN.
constexpr int kNoMessage = 0xff;

// Each throws an error that names the operator, the argument, its contract and the value.

// So many tensors, one for each rank: at least `least`, at most kMaxRanks.
C10_EXPORT void check_ranks(const char* op, const char* argument, int64_t ranks, int64_t least);
// failed: one int64 on the device; none is taken as well.
C10_EXPORT void check_failed(const char* op, const std::optional<at::Tensor>& failed,
                             at::Device device);
// controls: of each rank, flat int64, control_words(ranks) of them, on one device, sharing no
// memory. rank: one of theirs. Returns the timeout in nanoseconds.
C10_EXPORT int64_t check_barrier(at::TensorList controls, int64_t rank, double timeout);
// shards: of each rank, contiguous bytes, a multiple of 4 of them. message: as many bytes as all of
// them have, sharing no memory with any.
C10_EXPORT void check_gather(at::TensorList shards, const at::Tensor& message,
                             const std::optional<at::Tensor>& failed);

// Waits for a device, other than the CPU.
C10_EXPORT bool has_failed(const std::optional<at::Tensor>& failed);

}  // namespace commhook::symmetric
