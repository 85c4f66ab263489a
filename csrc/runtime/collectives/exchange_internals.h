// Parts of Exchanges that its sources share.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <exception>

#include "runtime/collectives/exchanges.h"

namespace commhook {

// Far from the tags that users choose on the same group. The two tags before it are for messages
// that never come.
inline constexpr int64_t kFirstTag = int64_t{1} << 30;

inline constexpr const char* kStopped = "exchange: the process group was closed (gloo)";

// Keeps modes of Python from the messages: they are none of a user's operators, and an error that
// passes through Python would leave its mark there.
class WithoutModes {
 public:
  WithoutModes()
      : guard_(
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

// Whether this thread waits for messages. Such a thread is not Gloo's, so it may hold a group.
extern thread_local bool is_runner;

template <typename Call>
Exchanges::WorkPtr Exchanges::with(int rank, const Call& call) const {
  try {
    return call();
  } catch (...) {
    std::rethrow_exception(named(lanes_[rank], std::current_exception()));
  }
}

}  // namespace commhook
