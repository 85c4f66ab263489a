#include "runtime/waiting.h"

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace py = pybind11;

namespace commhook {
namespace {

struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

}  // namespace

bool wait_for(const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(seconds));
  const auto signal = std::make_shared<Signal>();
  py::gil_scoped_release no_gil;
  // Outlives this call where the Future does not complete in time.
  future->fut->addCallback([signal](c10::ivalue::Future&) {
    const std::lock_guard lock(signal->mutex);
    signal->done = true;
    signal->changed.notify_one();
  });
  for (;;) {
    {
      std::unique_lock lock(signal->mutex);
      const auto next = std::min(deadline, Clock::now() + std::chrono::milliseconds(100));
      if (signal->changed.wait_until(lock, next, [&] { return signal->done; })) {
        return true;
      }
    }
    if (Clock::now() >= deadline) {
      return false;
    }
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

}  // namespace commhook
