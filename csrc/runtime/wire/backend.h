// A backend of torch.distributed: "commhook". Tensors on a device pass through memory of the host.
//
// Ranks begin collectives in the same order; any number may be under way. Only wait() waits, and no
// operation has a thread. If operations of up to 16 ranks differ, all of them get an error, as do
// all that wait for a rank that is late or has ended. After an error the tensors may hold anything,
// and the group needs another channel.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "runtime/wire/channel.h"
#include "runtime/wire/exchanges.h"

namespace commhook::wire {

// Has all collectives, and messages to and from a rank that is named.
class WireBackend : public c10d::Backend {
 public:
  static c10::intrusive_ptr<WireBackend> make(std::shared_ptr<Channel> channel,
                                              std::chrono::milliseconds timeout);
  // Lets Python know the class of what make() returns, so that a group's backend is a WireBackend.
  static void bind_made(pybind11::module_& m);

  // Ends the operations of all ranks with this reason.
  virtual void fail(const std::string& why) = 0;
  // As Channel::close().
  virtual void close(const std::string& why, Failure::Kind kind, std::optional<int> rank) = 0;
  // Why operations fail, if they do.
  virtual std::optional<Failure> failure() = 0;
  // As Channel::drain().
  virtual std::optional<bool> drain(std::chrono::milliseconds longest) = 0;
  // From now on operations have another channel of the same ranks. All of them call this.
  virtual void use(std::shared_ptr<Channel> channel) = 0;
  virtual std::shared_ptr<Exchanges> exchanges() = 0;

 protected:
  using Backend::Backend;
};

}  // namespace commhook::wire
