#include "runtime/process_group/backends.h"

namespace commhook {
namespace {

// A member of the class's own, since PyTorch has no way to take a backend off.
struct Backends : c10d::ProcessGroup {
  static auto take(c10d::ProcessGroup& group) {
    auto by_type = std::exchange(group.*(&Backends::backendTypeToBackend_), {});
    auto by_device = std::exchange(group.*(&Backends::deviceTypeToBackend_), {});
    return std::pair(std::move(by_type), std::move(by_device));
  }
};

}  // namespace

void drop_backends(c10d::ProcessGroup& group) { Backends::take(group); }

}  // namespace commhook
