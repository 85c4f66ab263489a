#include "runtime/process_group/backends.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/FakeProcessGroup.hpp>
#include <typeinfo>
#include <utility>

#if __has_include(<torch/csrc/distributed/c10d/py/PyBackend.hpp>)  // torch 2.14 and newer
#include <torch/csrc/distributed/c10d/py/PyBackend.hpp>
#define COMMHOOK_HAS_PY_BACKEND
#endif

#include "runtime/process_group/gloo_loops.h"

namespace commhook {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause(50);
constexpr milliseconds kLongestPause(1000);

// Accesses protected members: PyTorch has no function that removes a backend.
struct Backends : c10d::ProcessGroup {
  static auto take(c10d::ProcessGroup& group) {
    auto by_type = std::exchange(group.*(&Backends::backendTypeToBackend_), {});
    auto by_device = std::exchange(group.*(&Backends::deviceTypeToBackend_), {});
    return std::pair(std::move(by_type), std::move(by_device));
  }
};

// The progress of a backend's end.
struct Ending {
  explicit Ending(const std::vector<std::vector<uint8_t>>& addresses) : loops(addresses) {}

  const GlooLoops loops;
  std::mutex mutex;
  std::condition_variable changed;
  bool is_idle = false;       // no collective is in flight
  bool is_let_go = false;     // nothing here holds the backend
  bool is_looked_at = false;  // since then, help() has looked for loops
  bool are_gone = false;      // no loop is left
};

// Helps loops to end that would not end themselves. Returns when all have ended.
void help(const std::shared_ptr<Ending>& ending) {
  // Most loops end themselves, and quieten() slows a loop that still serves collectives.
  milliseconds pause = kFirstPause;
  std::unique_lock lock(ending->mutex);
  while (!ending->are_gone) {
    ending->changed.wait_for(lock, pause,
                             [&] { return ending->is_let_go && !ending->is_looked_at; });
    pause = std::min(2 * pause, kLongestPause);
    ending->are_gone = !ending->loops.quieten(ending->is_idle);
    ending->is_looked_at = ending->is_let_go;
    ending->changed.notify_all();
  }
}

}  // namespace

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

TakenBackends::TakenBackends(c10d::ProcessGroup& group, std::vector<std::vector<uint8_t>> addresses,
                             c10::intrusive_ptr<c10d::Work> last)
    : addresses_(std::move(addresses)), last_(std::move(last)) {
  const auto [by_type, by_device] = Backends::take(group);
  for (const auto& each : by_type) {
    backends_.push_back(each.second);
  }
  for (const auto& each : by_device) {
    backends_.push_back(each.second);
  }
}

void TakenBackends::close() {
  if (addresses_.empty() || backends_.empty()) {
    backends_.clear();
    return;
  }
  const auto ending = std::make_shared<Ending>(addresses_);
  addresses_.clear();
  const bool is_ours = std::all_of(backends_.begin(), backends_.end(), [this](const auto& each) {
    const auto own = std::count(backends_.begin(), backends_.end(), each);
    return each.use_count() == static_cast<uint32_t>(own);
  });
  std::thread helper(help, ending);
  backends_.clear();  // waits for collectives in flight
  std::unique_lock lock(ending->mutex);
  ending->is_idle = is_ours;
  if (is_ours && last_ != nullptr) {
    // The connections still exist, unused. A connection that waits to send would end the process if
    // it could send while the loop ends.
    (void)ending->loops.quieten(true);
  }
  lock.unlock();
  last_.reset();
  lock.lock();
  ending->is_let_go = true;
  ending->changed.notify_all();
  ending->changed.wait(lock, [&] { return ending->are_gone || ending->is_looked_at; });
  const bool are_gone = ending->are_gone;
  lock.unlock();
  if (are_gone) {
    helper.join();
  } else {
    helper.detach();  // a caller's Work keeps the loops
  }
}

}  // namespace commhook
