// Spans that PyTorch's profiler records, also where another thread ends them.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

namespace commhook {

// What records on a thread: the profiler that was started there. Other threads take it over for
// work that they do for this one, since a profiler sees only the threads that have its state.
class ThreadProfiler {
 public:
  // That of this thread. Null where nothing records.
  static std::shared_ptr<const ThreadProfiler> current();

  // Whether spans of a thread must end in the reverse order in which they began, on that thread:
  // markers of NVTX and ITT are no more than "begin" and "end". Only Kineto's may end elsewhere.
  bool nests() const { return nests_; }

  // Gives the profiler to this thread until the guard goes. One that has ended records nothing.
  // Does nothing where the thread has it already: there the profiler may be stopped meanwhile.
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
  // Not kept: a span that outlives the profiler must not write to events that are gone.
  std::weak_ptr<c10::ThreadLocalDebugInfo> info_;
  bool has_info_ = false;
  bool nests_ = false;
};

// A span of time under a name. It ends with end(), or else with the object.
class Span {
 public:
  // Begins on this thread.
  // `is_async`: other spans of this thread may begin or end before it does, or another thread may
  // end it. Not recorded where spans nest().
  Span(std::shared_ptr<const ThreadProfiler> profiler, const std::string& name, bool is_async);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  Span(Span&&) = delete;
  Span& operator=(Span&&) = delete;

  // Ends the span, once: on any thread.
  void end();

 private:
  const std::shared_ptr<const ThreadProfiler> profiler_;
  std::optional<at::RecordFunction> record_;
  std::atomic<bool> ended_{false};
};

// Ends a span once a Future is complete, before callbacks that the Future gets later.
void end_with(const std::shared_ptr<Span>& span, c10::ivalue::Future& future);

// "commhook::encode (bucket 0, blockwise(bits=4))". The bucket comes first: tables cut names.
std::string span_name(const char* stage, int64_t bucket, const std::string& hook);

}  // namespace commhook
