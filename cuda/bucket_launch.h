// The launchers of the bucket kernels. Each uses the current stream of the current device, launches
// nothing if there are no elements, and never waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor_table.h"

namespace commhook::cuda {

// Writes the segments' elements to the buffer, in order: scaled, then cast.
void launch_flatten(c10::ArrayRef<Segment<const void>> segments, double scale,
                    const at::Tensor& buffer);
// The same; also writes the 0-dimensional sum_of_squares (float64) and nonfinite_count (int64).
void launch_flatten_stats(c10::ArrayRef<Segment<const void>> segments, double scale,
                          const at::Tensor& buffer, const at::Tensor& sum_of_squares,
                          const at::Tensor& nonfinite_count);
// Writes the buffer's elements to the segments, in order.
void launch_unflatten_into(const at::Tensor& buffer, c10::ArrayRef<Segment<void>> segments,
                           double scale);

}  // namespace commhook::cuda
