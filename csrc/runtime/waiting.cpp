#include "runtime/waiting.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

namespace py = pybind11;
using c10::ivalue::Future;

namespace commhook {
namespace {

struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

}  // namespace

bool wait_for(c10::ivalue::Future& future, double seconds) {
  if (future.completed()) {
    return true;
  }
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(seconds));
  std::optional<py::gil_scoped_release> no_gil;  // what completes it may be in Python
  if (PyGILState_Check()) {
    no_gil.emplace();
  }
  const auto signal = std::make_shared<Signal>();
  // Outlives this call where the Future does not complete in time.
  future.addCallback([signal](Future&) {
    const std::lock_guard lock(signal->mutex);
    signal->done = true;
    signal->changed.notify_one();
  });
  for (;;) {
    {
      std::unique_lock lock(signal->mutex);
      const auto next = std::min(deadline, Clock::now() + std::chrono::milliseconds(50));
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
