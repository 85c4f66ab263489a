#pragma once

#include <ATen/core/Tensor.h>

namespace commhook {

// Whether the C++ reducer of a DistributedDataParallel averages the parameter's gradient.
bool has_ddp_hook(const at::Tensor& parameter);

}  // namespace commhook
