#include "runtime/cpp_hooks/cpp_hook.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <memory>

#include "ops/bucket/bucket_dtype.h"
#include "ops/type_names.h"
#include "runtime/hooks/named_errors.h"
#include "runtime/profiling/span.h"
#include "runtime/python/hook_names.h"

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
  const auto own_group = spec_.takes_group ? group : ProcessGroupPtr();
  std::shared_ptr<Made> made;
  {
    const std::lock_guard lock(mutex_);
    auto& known = made_[own_group];
    if (!known) {
      known = std::make_shared<Made>();
    }
    made = known;
  }
  // A constructor may be slow, or wait for other ranks. So this locks only callers of the same
  // object.
  const std::lock_guard lock(made->mutex);
  if (!made->hook) {
    made->hook = spec_.make(values_, own_group);
  }
  return made->hook;
}

at::ScalarType CppHook::result_dtype(const CommHookInterface& hook, const GradBucket& bucket,
                                     const std::string& where) const {
  const auto own = bucket.dtype();
  const auto dtype = named_errors(where, [&] { return hook.resultDtype(bucket); });
  TORCH_CHECK_TYPE(dtype == own || (is_bucket_dtype(dtype) && is_bucket_dtype(own)), where,
                   ": resultDtype must return a dtype that can be cast to ", dtype_name(own),
                   ", got ", dtype_name(dtype));
  return dtype;
}

at::ScalarType CppHook::result_dtype(const GradBucket& bucket) const {
  const auto hook_where = where(bucket);
  const auto hook = named_errors(hook_where, [&] { return hook_for(bucket.getProcessGroup()); });
  return result_dtype(*hook, bucket, hook_where);
}

CppRun CppHook::start(GradBucket& bucket) const {
  const at::NoGradGuard no_grad;
  ResultSpec spec(where(bucket), bucket);
  auto hook = named_errors(spec.where, [&] { return hook_for(bucket.getProcessGroup()); });
  spec.dtype = result_dtype(*hook, bucket, spec.where);
  std::shared_ptr<Span> span;
  if (const auto profiler = ThreadProfiler::current()) {
    const auto name = span_name("wire", static_cast<int64_t>(bucket.getIndex()), name_);
    span = std::make_shared<Span>(profiler, name, /*is_async=*/true);
  }
  auto future = named_errors(spec.where, [&] {
    // On the CPU, the profiler does not see the hook's Works, for the reason that issue_unseen() in
    // torch_commhook/collectives/issuing.py gives.
    const at::RecordFunctionGuard seen(at::isRecordFunctionEnabled() &&
                                       !bucket.getBuffer().device().is_cpu());
    return hook->runHook(bucket);
  });
  TORCH_CHECK_TYPE(future, spec.where, ": runHook must return a Future, got a null pointer");
  if (span) {
    end_with(span, *future);
  }
  return {std::move(hook), std::move(future), std::move(spec), bucket.getBytesSent()};
}

}  // namespace commhook
