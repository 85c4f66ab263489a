#include "runtime/cpp_hook.h"

#include <ATen/core/grad_mode.h>

#include "ops/bucket_dtype.h"
#include "ops/dtype_name.h"
#include "runtime/hook_names.h"
#include "runtime/named_errors.h"

namespace commhook {
at::Tensor CppRun::result() const {
  const at::NoGradGuard no_grad;
  return check_result(named_errors(spec.where,
                                   [&] {
                                     if (future->hasError()) {
                                       std::rethrow_exception(future->exception_ptr());
                                     }
                                     return hook->parseHookResult(future->value());
                                   }),
                      spec);
}

std::string CppHook::where(const GradBucket& bucket) const {
  return hook_on_bucket(name_, static_cast<int64_t>(bucket.getIndex()),
                        static_cast<int64_t>(bucket.getBucketCount()));
}

std::shared_ptr<CommHookInterface> CppHook::hook_for(const ProcessGroupPtr& group) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [known, hook] : hooks_) {
    if (!spec_.takes_group || known == group) {
      return hook;
    }
  }
  const auto own_group = spec_.takes_group ? group : ProcessGroupPtr();
  auto hook = spec_.make(values_, own_group);
  hooks_.emplace_back(own_group, hook);
  return hook;
}

at::ScalarType CppHook::result_dtype(const GradBucket& bucket) const {
  const auto hook_where = where(bucket);
  const auto own = bucket.dtype();
  const auto dtype = named_errors(
      hook_where, [&] { return hook_for(bucket.getProcessGroup())->resultDtype(bucket); });
  TORCH_CHECK_TYPE(dtype == own || (is_bucket_dtype(dtype) && is_bucket_dtype(own)), hook_where,
                   ": resultDtype must return a dtype that can be cast to ", dtype_name(own),
                   ", got ", dtype_name(dtype));
  return dtype;
}

CppRun CppHook::start(GradBucket& bucket) const {
  const at::NoGradGuard no_grad;
  ResultSpec spec(where(bucket), bucket);
  spec.dtype = result_dtype(bucket);
  auto hook = named_errors(spec.where, [&] { return hook_for(bucket.getProcessGroup()); });
  auto future = named_errors(spec.where, [&] { return hook->runHook(bucket); });
  TORCH_CHECK_TYPE(future, spec.where, ": runHook must return a Future, got a null pointer");
  return {std::move(hook), std::move(future), std::move(spec), bucket.getBytesSent()};
}

}  // namespace commhook
