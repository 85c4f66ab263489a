#include "runtime/process_group/backends.h"

#include <utility>

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

TakenBackends::TakenBackends(c10d::ProcessGroup& group) {
  const auto [by_type, by_device] = Backends::take(group);
  for (const auto& each : by_type) {
    backends_.push_back(each.second);
  }
  for (const auto& each : by_device) {
    backends_.push_back(each.second);
  }
}

void TakenBackends::close() { backends_.clear(); }

}  // namespace commhook
