#include "runtime/profiling/span.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <utility>

namespace commhook {
namespace {

bool has_nested_spans() {
  using torch::profiler::impl::ActiveProfilerType;
  const auto type = torch::profiler::impl::profilerType();
  return type != ActiveProfilerType::NONE && type != ActiveProfilerType::KINETO;
}

}  // namespace

std::shared_ptr<const ThreadProfiler> ThreadProfiler::current() {
  if (!at::hasCallbacks() || !at::isRecordFunctionEnabled()) {
    return nullptr;
  }
  auto found = std::make_shared<ThreadProfiler>();
  const auto info = c10::ThreadLocalDebugInfo::current();
  found->callbacks_ = at::get_record_function_tls_();
  found->info_ = info;
  found->has_info_ = info != nullptr;
  found->nests_ = has_nested_spans();
  return found;
}

ThreadProfiler::Guard::Guard(const ThreadProfiler& profiler) {
  auto info = profiler.info_.lock();
  auto before = c10::ThreadLocalDebugInfo::current();
  has_it_ = info && info == before;
  if (has_it_) {
    return;
  }
  callbacks_ = at::get_record_function_tls_();
  info_ = std::move(before);
  const bool has_ended = profiler.has_info_ && !info;
  at::set_record_function_tls_(has_ended ? at::RecordFunctionTLS{{}, false} : profiler.callbacks_);
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(info));
}

ThreadProfiler::Guard::~Guard() {
  if (!has_it_) {
    at::set_record_function_tls_(callbacks_);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(info_));
  }
}

Span::Span(std::shared_ptr<const ThreadProfiler> profiler, const std::string& name, bool is_async)
    : profiler_(std::move(profiler)) {
  if (is_async && profiler_->nests()) {
    return;
  }
  record_.emplace(at::RecordScope::USER_SCOPE);
  if (record_->isActive()) {
    if (is_async) {
      record_->_setAsync();
    }
    record_->before(name);
  }
}

Span::~Span() { end(); }

void Span::end() {
  std::call_once(ended_, [this] {
    if (record_ && record_->isActive()) {
      const ThreadProfiler::Guard guard(*profiler_);
      record_->end();
    }
  });
}

void end_with(const std::shared_ptr<Span>& span, c10::ivalue::Future& future) {
  future.addCallback([span](c10::ivalue::Future&) { span->end(); }, /*uses_future=*/false);
}

std::string span_name(const char* stage, int64_t bucket, const std::string& hook) {
  return c10::str("commhook::", stage, " (bucket ", bucket, ", ", hook, ")");
}

}  // namespace commhook
