#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace commhook {

// Whether a group is PyTorch's own, and is known to have a backend for a device that is compiled
// and exchanges messages. Such a backend writes what its rank receives, and nothing else. A backend
// of a Python class may differ, PyTorch's fake one writes nothing, and its wrapper may hold any of
// them.
bool has_compiled_backend(c10d::ProcessGroup& group, c10::DeviceType device);

}  // namespace commhook
