// Spans for PyTorch's profiler that another thread may end.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace commhook {

// The profiler that was started on a thread. Other threads adopt it while they work for this one,
// since a profiler sees only threads with its state.
class ThreadProfiler {
 public:
  // The profiler of this thread. Null if nothing records.
  static std::shared_ptr<const ThreadProfiler> current();

  // Whether a thread's spans must end on that thread, in reverse order: markers of NVTX and ITT
  // mean only "begin" and "end". Only Kineto's spans may end elsewhere.
  bool nests() const { return nests_; }

  // Gives the profiler to this thread for the guard's life. A profiler that has ended records
  // nothing. Does nothing if the thread already has it, since the profiler may be stopped there
  // meanwhile.
  class Guard {
   public:
    explicit Guard(const ThreadProfiler& profiler);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    Guard(Guard&&) = delete;
    Guard& operator=(Guard&&) = delete;

   private:
    bool has_it_ = false;
    at::RecordFunctionTLS callbacks_;
    std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
  };

 private:
  at::RecordFunctionTLS callbacks_;
  // Weak: a span that outlives the profiler must not write to freed events.
  std::weak_ptr<c10::ThreadLocalDebugInfo> info_;
  bool has_info_ = false;
  bool nests_ = false;
};

// A named span of time. It ends with end(), or with the object.
class Span {
 public:
  // Begins on this thread.
  // `is_async`: another thread may end the span, or other spans of this thread may overlap it. Not
  // recorded if nests() is true.
  Span(std::shared_ptr<const ThreadProfiler> profiler, const std::string& name, bool is_async);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  Span(Span&&) = delete;
  Span& operator=(Span&&) = delete;

  // Ends the span, on any thread. It has ended when this returns; later calls do nothing.
  void end();

 private:
  const std::shared_ptr<const ThreadProfiler> profiler_;
  std::optional<at::RecordFunction> record_;
  std::once_flag ended_;
};

// Ends a span when a Future completes, before callbacks that are added later.
void end_with(const std::shared_ptr<Span>& span, c10::ivalue::Future& future);

// For example "commhook::encode (bucket 0, blockwise(bits=4))". The bucket comes first, since
// tables cut names.
std::string span_name(const char* stage, int64_t bucket, const std::string& hook);

}  // namespace commhook
