// The interface of a communication hook in C++, and an adapter for hooks of PyTorch's interface.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "commhook/grad_bucket.h"
#include "commhook/hook_result.h"
#include "commhook/version.h"

namespace commhook {

// The thread of the backward pass calls this without the GIL and outside of autograd, for a model's
// buckets one after another, in order. One object serves all steps of all models that the Python
// hook is attached to. Models that train in several threads may call it at once.
class COMMHOOK_EXPORT CommHookInterface {
 public:
  virtual ~CommHookInterface() = default;

  // Starts averaging a bucket over the ranks. Returns a Future of a tensor with as many elements,
  // or of a list with one such tensor. Must not wait, or the buckets are sent one by one.
  // backward() raises the errors that this throws, with the hook's name.
  virtual c10::intrusive_ptr<c10::ivalue::Future> runHook(GradBucket& bucket) = 0;

  // Extracts a tensor from the Future's value.
  virtual at::Tensor parseHookResult(const c10::IValue& result) {
    return parseCppCommHookResult(result);
  }

  // The dtype of the result. It may be another floating-point dtype than the bucket's: the caller
  // casts the result while copying it into the gradients, which saves a pass over memory.
  virtual at::ScalarType resultDtype(const GradBucket& bucket) const { return bucket.dtype(); }
};

// Runs a hook that was written against c10d/comm.hpp.
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
