// A communication hook: each rank clips its bucket's gradients to a norm, then all average them.
#include <commhook/comm_hook.h>

namespace {

class ClippedMean : public commhook::CommHookInterface {
 public:
  ClippedMean(double max_norm, double eps) : max_norm_(max_norm), eps_(eps) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(commhook::GradBucket& bucket) override {
    const double ranks = bucket.getProcessGroup()->getSize();
    at::Tensor buffer = bucket.scaledBuffer(1.0 / ranks);  // gathered and scaled in one pass
    const at::Tensor norm = buffer.norm() * ranks;
    buffer.mul_((max_norm_ / (norm + eps_)).clamp_max(1.0));  // on the device: nothing waits
    return commhook::allReduce(bucket, buffer);
  }

 private:
  const double max_norm_;
  const double eps_;
};

COMMHOOK_REGISTER_HOOK(ClippedMean, "clipped_mean", commhook::Option<double>("max_norm").above(0),
                       commhook::Option<double>("eps", 1e-6).atLeast(0));

}  // namespace
