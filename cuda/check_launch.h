// The launcher of check_finite's kernel. It uses the current stream of the current device, launches
// nothing if there are no elements, and never waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor_table.h"

namespace commhook::cuda {

// Adds the number of infinite and NaN elements to `count`.
void launch_check_finite(c10::ArrayRef<Segment<const void>> segments, const at::Tensor& count);

}  // namespace commhook::cuda
