// A communication hook in C++ with values for its options, and the call for one bucket.
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

// A C++ hook that runs on one bucket.
struct CppRun {
  std::shared_ptr<CommHookInterface> hook;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  ResultSpec spec;
  std::optional<int64_t> bytes_sent;

  // The checked result of a complete Future. Throws the hook's error, with the hook's name.
  at::Tensor result() const;
};

class CppHook {
 public:
  // The spec lives as long as the process. `name` is the hook's name in errors.
  CppHook(const CommHookSpec& spec, std::vector<OptionValue> values, std::string name)
      : spec_(spec), values_(std::move(values)), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  const CommHookSpec& spec() const { return spec_; }
  const std::vector<OptionValue>& values() const { return values_; }

  // Starts the hook. None of these needs the GIL. Errors name hook and bucket.
  CppRun start(GradBucket& bucket) const;
  at::ScalarType result_dtype(const GradBucket& bucket) const;

 private:
  // An object of the hook's class; null until it is constructed.
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
  // One object for all groups. A hook that takes its group has one for each group that it has run
  // over.
  mutable std::mutex mutex_;
  mutable std::map<ProcessGroupPtr, std::shared_ptr<Made>> made_;
};

}  // namespace commhook
