// Registers a good hook, and one with a name of torch_commhook's own.
#include <commhook/comm_hook.h>

namespace {

class Mean : public commhook::CommHookInterface {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> runHook(commhook::GradBucket& bucket) override {
    return commhook::allReduce(bucket, bucket.getBuffer());
  }
};
COMMHOOK_REGISTER_HOOK(Mean, "mean_of_wrong_hooks");
COMMHOOK_REGISTER_HOOK(Mean, "allreduce");

}  // namespace
