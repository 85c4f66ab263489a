#include "runtime/wire/staging.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>

namespace commhook::wire {
namespace {

using c10::impl::VirtualGuardImpl;
using std::chrono::microseconds;

// Between two looks at an event. A wait of CUDA's would keep a core busy.
constexpr microseconds kShortest{20};
constexpr microseconds kLongest{200};

// The callbacks of Futures use those of low priority.
c10::Stream of_its_own(at::Device device) {
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Event recorded(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

}  // namespace

Staging& Staging::on(at::Device device) {
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<at::Device, Staging*, bool (*)(at::Device, at::Device)>(
      [](at::Device a, at::Device b) {
        return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
      });
  const std::lock_guard lock(mutex);
  auto& found = all[device];
  if (found == nullptr) {
    found = new Staging(device);
  }
  return *found;
}

Staging::Staging(at::Device device)
    : device_(device), fetching_(of_its_own(device)), writing_(of_its_own(device)) {}

at::Tensor Staging::memory(const at::Tensor& tensor) {
  const auto options = at::TensorOptions(tensor.scalar_type()).pinned_memory(tensor.is_cuda());
  return at::empty({tensor.numel()}, options);
}

c10::Stream Staging::current() const { return VirtualGuardImpl(device_.type()).getStream(device_); }

c10::Event Staging::now() const { return recorded(current()); }

void Staging::fetch(const at::Tensor& from, const at::Tensor& to) const {
  now().block(fetching_);
  const c10::StreamGuard guard(fetching_);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  to.view(from.sizes()).copy_(from, /*non_blocking=*/true);
}

void Staging::when_fetched(Then then) {
  auto event = recorded(fetching_);
  const std::lock_guard lock(mutex_);
  waiting_.emplace_back(std::move(event), std::move(then));
  if (!has_thread_) {
    std::thread([this] { serve(); }).detach();
    has_thread_ = true;
  }
  changed_.notify_one();
}

void Staging::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !waiting_.empty(); });
    auto [event, then] = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      for (auto pause = kShortest; !event.query(); pause = std::min(2 * pause, kLongest)) {
        std::this_thread::sleep_for(pause);
      }
      event.synchronize();  // for the device's errors
    } catch (...) {
      error = std::current_exception();
    }
    then(std::move(error));
    then = nullptr;
    lock.lock();
  }
}

void Staging::put(const at::Tensor& to, const at::Tensor& from) const {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  to.copy_(from.view(to.sizes()), /*non_blocking=*/true);
  VirtualGuardImpl(device_.type()).recordDataPtrOnStream(to.storage().data_ptr(), writing_);
}

}  // namespace commhook::wire
