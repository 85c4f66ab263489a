// The C++ hooks of this library.
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <utility>

#include "commhook/comm_hook.h"

namespace commhook {
namespace {

double average_scale(const GradBucket& bucket) { return 1.0 / bucket.getProcessGroup()->getSize(); }

// Hides the span of the group's Work from PyTorch's profiler, for the reason that issue_unseen() in
// torch_commhook/collectives/works.py gives.
c10::intrusive_ptr<c10::ivalue::Future> unseen_sum(GradBucket& bucket, at::Tensor tensor) {
  std::optional<at::DisableRecordFunctionGuard> guard;
  if (tensor.device().is_cpu()) {
    guard.emplace();
  }
  return allReduce(bucket, std::move(tensor));
}

// hooks.allreduce() in C++.
class AllReduce : public CommHookInterface {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> runHook(GradBucket& bucket) override {
    return unseen_sum(bucket, bucket.scaledBuffer(average_scale(bucket)));
  }
};

// hooks.cast(dtype) with fewer than 8 ranks in C++: one all-reduce, which adds in dtype.
class Cast : public CommHookInterface {
 public:
  explicit Cast(at::ScalarType dtype) : dtype_(dtype) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(GradBucket& bucket) override {
    TORCH_CHECK_TYPE(!bucket.isSparse(), "gradients must be dense, got layout ",
                     bucket.getBuffer().layout(), "; allreduce takes sparse ones");
    at::Tensor wire = workspaces_.get(bucket, dtype_);
    bucket.flattenInto(average_scale(bucket), wire);
    return unseen_sum(bucket, wire);
  }

  at::ScalarType resultDtype(const GradBucket& /*bucket*/) const override { return dtype_; }

 private:
  const at::ScalarType dtype_;
  Workspaces workspaces_;
};

COMMHOOK_REGISTER_HOOK(AllReduce, "allreduce");
COMMHOOK_REGISTER_HOOK(
    Cast, "cast", Option<at::ScalarType>("dtype", at::kBFloat16).oneOf({at::kBFloat16, at::kHalf}));

}  // namespace
}  // namespace commhook
