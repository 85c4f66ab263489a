#include "runtime/process_group/backends.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/process_group/gloo_loops.h"

namespace commhook {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause(50);
constexpr milliseconds kLongestPause(1000);

// A member of the class's own, since PyTorch has no way to take a backend off.
struct Backends : c10d::ProcessGroup {
  static auto take(c10d::ProcessGroup& group) {
    auto by_type = std::exchange(group.*(&Backends::backendTypeToBackend_), {});
    auto by_device = std::exchange(group.*(&Backends::deviceTypeToBackend_), {});
    return std::pair(std::move(by_type), std::move(by_device));
  }
};

// The loops of a backend that is ending.
struct Ending {
  explicit Ending(const std::vector<std::vector<uint8_t>>& addresses) : loops(addresses) {}

  const GlooLoops loops;
  // Whether no collective is under way any more.
  std::atomic<bool> is_idle{false};
};

// Lets loops end that would not by themselves. Returns once they have.
void help(const std::shared_ptr<Ending>& ending) {
  // Most end by themselves. A loop that still serves collectives is slowed down.
  milliseconds pause = kFirstPause;
  do {
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  } while (ending->loops.quieten(ending->is_idle));
}

}  // namespace

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
  std::thread(help, ending).detach();
  backends_.clear();  // waits for collectives under way
  if (is_ours) {
    ending->is_idle = true;
    if (last_ != nullptr) {
      // The connections are still there, and nobody uses them. One that waited until it can send
      // would end the process if that happened while the loop ends.
      (void)ending->loops.quieten(true);
    }
  }
  last_.reset();
}

}  // namespace commhook
