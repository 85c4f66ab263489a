// Communication hooks in C++: write a class, register it, load the library with
// torch_commhook.load_cpp_hooks(), and attach it with hooks.cpp("name", **options).
//
//   class Mean : public commhook::CommHookInterface {
//    public:
//     c10::intrusive_ptr<c10::ivalue::Future> runHook(commhook::GradBucket& bucket) override {
//       const double ranks = bucket.getProcessGroup()->getSize();
//       return commhook::allReduce(bucket, bucket.scaledBuffer(1.0 / ranks));
//     }
//   };
//   COMMHOOK_REGISTER_HOOK(Mean, "mean");
//
// Everything here is in headers: a library of hooks links with torch alone.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <type_traits>
#include <utility>

#include "commhook/collectives.h"
#include "commhook/grad_bucket.h"
#include "commhook/hook_result.h"
#include "commhook/registry.h"
#include "commhook/workspaces.h"

namespace commhook {

// A communication hook that keeps a state.
template <typename State>
class CppCommHookInterface : public CommHookInterface {
 public:
  explicit CppCommHookInterface(State state) : state_(std::move(state)) {}

 protected:
  State state_;
};

}  // namespace commhook
