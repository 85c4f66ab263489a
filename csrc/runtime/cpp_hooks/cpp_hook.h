// A communication hook in C++, with values for its options, and how it is called for one bucket.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "commhook/registry.h"
#include "runtime/hooks/hook_result.h"

namespace commhook {

// A C++ hook on its way with one bucket.
struct CppRun {
  std::shared_ptr<CommHookInterface> hook;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  ResultSpec spec;
  std::optional<int64_t> bytes_sent;

  // The checked result, once the Future is complete. Throws what the hook failed with, named.
  at::Tensor result() const;
};

class CppHook {
 public:
  // The spec lives as long as the process. `name` is what errors call the hook.
  CppHook(const CommHookSpec& spec, std::vector<OptionValue> values, std::string name)
      : spec_(spec), values_(std::move(values)), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  const CommHookSpec& spec() const { return spec_; }
  const std::vector<OptionValue>& values() const { return values_; }

  // Starts the hook. None of these needs the GIL. Errors name hook and bucket.
  CppRun start(GradBucket& bucket) const;
  at::ScalarType result_dtype(const GradBucket& bucket) const;

 private:
  // An object of the hook's class; null until it has been made.
  struct Made {
    std::mutex mutex;
    std::shared_ptr<CommHookInterface> hook;
  };

  std::shared_ptr<CommHookInterface> hook_for(const ProcessGroupPtr& group) const;
  at::ScalarType result_dtype(const CommHookInterface& hook, const GradBucket& bucket,
                              const std::string& where) const;
  std::string where(const GradBucket& bucket) const;

  const CommHookSpec& spec_;
  const std::vector<OptionValue> values_;
  const std::string name_;
  // One for all groups, or one for each that it has run over. A hook that takes its group keeps it.
  mutable std::mutex mutex_;
  mutable std::map<ProcessGroupPtr, std::shared_ptr<Made>> made_;
};

}  // namespace commhook
