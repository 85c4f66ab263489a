#include "runtime/python/waiting.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "runtime/python/main_thread.h"
#include "runtime/python/py_ref.h"

namespace py = pybind11;
using c10::ivalue::Future;

namespace commhook {
namespace {

// The time between two checks for Ctrl-C in a thread, for all Futures together, since a check takes
// the GIL. Only the main thread checks: Python raises nothing in others, and a thread that requests
// the GIL while the interpreter ends is killed.
constexpr std::chrono::milliseconds kBetweenChecks{500};
constexpr std::chrono::milliseconds kShortly{50};

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
  const bool checks = on_main_thread();
  static thread_local auto last_check = Clock::time_point();
  std::optional<py::gil_scoped_release> no_gil;  // a Python thread may have to complete it
  if (gil_is_held()) {
    no_gil.emplace();
  }
  const auto signal = std::make_shared<Signal>();
  // The callback may outlive this call.
  future.addCallback([signal](Future&) {
    const std::lock_guard lock(signal->mutex);
    signal->done = true;
    signal->changed.notify_one();
  });
  for (;;) {
    {
      std::unique_lock lock(signal->mutex);
      const auto next = checks ? std::min(deadline, Clock::now() + kShortly) : deadline;
      if (signal->changed.wait_until(lock, next, [&] { return signal->done; })) {
        return true;
      }
    }
    if (Clock::now() >= deadline) {
      return false;
    }
    if (checks && Clock::now() - last_check >= kBetweenChecks) {
      last_check = Clock::now();
      py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
      }
    }
  }
}

void wait_for_result(c10::ivalue::Future& future, const std::string& where, double seconds) {
  if (!wait_for(future, seconds)) {
    py::gil_scoped_acquire gil;
    py::set_error(
        PyExc_TimeoutError,
        c10::str(where, ": its Future is not complete after ", seconds, " seconds").c_str());
    throw py::error_already_set();
  }
}

}  // namespace commhook
