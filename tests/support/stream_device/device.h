// A device with the host's memory, and with operators that run on streams.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "../host_streams/streams.h"

namespace stream_device {

using namespace host_streams;

// Calls a function without the GIL, since a task may need the GIL to free a tensor.
extern void (*without_gil)(const std::function<void()>& function);

// A tensor on the host that shares the memory of one on the device, and keeps it.
at::Tensor on_host(const at::Tensor& tensor);

// Makes operators of the library run their CPU kernels on streams, as CUDA runs its own.
void use_cpu_kernels(const std::vector<std::string>& operators);

}  // namespace stream_device
