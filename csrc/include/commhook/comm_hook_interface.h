// What a communication hook in C++ is, and hooks that were written for PyTorch's interface.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "commhook/grad_bucket.h"
#include "commhook/hook_result.h"
#include "commhook/version.h"

namespace commhook {

// Runs without the GIL, outside of autograd, on the thread that runs backward: a model's buckets
// come one after another, in order. One object serves all steps, of all models that the hook in
// Python is attached to; models that train in several threads at once call it at once.
class COMMHOOK_EXPORT CommHookInterface {
 public:
  virtual ~CommHookInterface() = default;

  // Starts averaging a bucket over the ranks. Gives a Future of a tensor with as many elements, or
  // of a list of one. Nothing may wait in here, or the buckets come one by one. What it throws
  // comes out of backward(), named.
  virtual c10::intrusive_ptr<c10::ivalue::Future> runHook(GradBucket& bucket) = 0;

  // Makes a tensor of what the Future holds.
  virtual at::Tensor parseHookResult(const c10::IValue& result) {
    return parseCppCommHookResult(result);
  }

  // The dtype of that tensor. Where it is another floating-point dtype than the bucket's, whoever
  // takes the result casts it on its way into the gradients, which saves a pass over memory.
  virtual at::ScalarType resultDtype(const GradBucket& bucket) const { return bucket.dtype(); }
};

// A hook that was written against c10d/comm.hpp.
class TorchCommHook : public CommHookInterface {
 public:
  explicit TorchCommHook(std::unique_ptr<c10d::CommHookInterface> hook) : hook_(std::move(hook)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(GradBucket& bucket) override {
    return hook_->runHook(bucket.torchBucket());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return hook_->parseHookResult(result);
  }

 private:
  const std::unique_ptr<c10d::CommHookInterface> hook_;
};

}  // namespace commhook
