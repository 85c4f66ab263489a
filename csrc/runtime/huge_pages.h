// Huge pages for buffers that live long.
#pragma once

#include <ATen/core/Tensor.h>

namespace commhook {

// Asks the system to hold a CPU tensor's memory in huge pages, also what has been touched already.
// Streaming through memory in 4 KiB pages spends much of its time on address translation.
// A hint: does nothing where the system has no huge pages, or none left, or the tensor is small.
void prefer_huge_pages(const at::Tensor& tensor);

}  // namespace commhook
