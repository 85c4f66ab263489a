// A hook of the autograd engine in C++, with values for its options.
#pragma once

#include <string>
#include <vector>

#include "commhook/registry.h"
#include "runtime/autograd/autograd_hook.h"

namespace commhook {

class CppAutogradHook {
 public:
  // `name` is the hook's name in errors.
  CppAutogradHook(const AutogradHookSpec& spec, std::vector<OptionValue> values, std::string name);

  const std::string& name() const { return name_; }
  const AutogradHookSpec& spec() const { return spec_; }
  const std::vector<OptionValue>& values() const { return values_; }
  HookKind kind() const { return static_cast<HookKind>(function_.index()); }
  // Errors that the hook throws carry its name.
  NativeHook native() const;

 private:
  const AutogradHookSpec& spec_;
  const std::vector<OptionValue> values_;
  const std::string name_;
  const AutogradHookFunction function_;
};

}  // namespace commhook
