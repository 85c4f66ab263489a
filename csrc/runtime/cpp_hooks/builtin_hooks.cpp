// The C++ hooks of this library.
#include <memory>

#include "commhook/comm_hook.h"

namespace commhook {
namespace {

double average_scale(const GradBucket& bucket) { return 1.0 / bucket.getProcessGroup()->getSize(); }

// hooks.allreduce() in C++.
class AllReduce : public CommHookInterface {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> runHook(GradBucket& bucket) override {
    return allReduce(bucket, bucket.scaledBuffer(average_scale(bucket)));
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
    return allReduce(bucket, wire);
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
