#include "runtime/process_group/backends.h"

#include <algorithm>
#include <string_view>
#include <torch/csrc/distributed/c10d/FakeProcessGroup.hpp>
#include <typeinfo>

#if __has_include(<torch/csrc/distributed/c10d/py/PyBackend.hpp>)  // torch 2.14 and newer
#include <torch/csrc/distributed/c10d/py/PyBackend.hpp>
#define COMMHOOK_HAS_PY_BACKEND
#endif

namespace commhook {

bool has_compiled_backend(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto devices = group.getDeviceTypes();
  if (typeid(group) != typeid(c10d::ProcessGroup) ||
      std::none_of(devices.begin(), devices.end(),
                   [device](const auto& each) { return each.type() == device; })) {
    return false;
  }
  const auto backend = group.getBackend(device);
  const auto& dynamic = *backend;
  // With TORCH_DISTRIBUTED_DEBUG=DETAIL any backend is inside this class, whose header needs
  // Gloo's.
  if (std::string_view(typeid(dynamic).name()).find("ProcessGroupWrapper") !=
      std::string_view::npos) {
    return false;
  }
#ifdef COMMHOOK_HAS_PY_BACKEND
  if (dynamic_cast<const c10d::PyBackend*>(backend.get()) != nullptr) {
    return false;
  }
#endif
  return dynamic_cast<const c10d::FakeProcessGroup*>(backend.get()) == nullptr;
}

}  // namespace commhook
