// A device whose memory is the host's, and whose operators run on streams.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "../host_streams/streams.h"

namespace stream_device {

using namespace host_streams;

// Calls a function without the GIL, which a task may need to let go of a tensor.
extern void (*without_gil)(const std::function<void()>& function);

// A tensor on the host over the memory of one on the device, which it keeps.
at::Tensor on_host(const at::Tensor& tensor);

// Has operators of the library run their kernels for the CPU on streams, as CUDA runs its own.
void use_cpu_kernels(const std::vector<std::string>& operators);

}  // namespace stream_device
