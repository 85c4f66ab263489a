// A backend of torch.distributed for tensors on the CPU: "commhook".
//
// Ranks begin collectives in the same order; any number may be under way. Only wait() waits, and no
// operation has a thread. If operations of up to 16 ranks differ, all of them get an error, as all
// ranks do if one is late or has ended. After an error the tensors may hold anything, and the group
// is of no use any more.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime/wire/channel.h"

namespace commhook::wire {

// Has all collectives, and messages to and from a rank that is named.
class WireBackend : public c10d::Backend {
 public:
  static c10::intrusive_ptr<WireBackend> make(std::shared_ptr<Channel> channel,
                                              std::chrono::milliseconds timeout);
  // Ends the operations of all ranks with this reason.
  virtual void fail(const std::string& why) = 0;

 protected:
  using Backend::Backend;
};

}  // namespace commhook::wire
