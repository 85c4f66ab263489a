#include "runtime/autograd/cpp_autograd_hook.h"

#include <utility>

#include "runtime/hooks/named_errors.h"

namespace commhook {
namespace {

// Adapts each kind of hook to the common signature.
NativeHook native_of(const TensorHook& hook) {
  return [hook](const variable_list& values, const variable_list&) {
    auto result = hook(values[0]);
    // Undefined means None in Python.
    return result.defined() ? variable_list{std::move(result)} : values;
  };
}
NativeHook native_of(const PreHook& hook) {
  return [hook](const variable_list& values, const variable_list&) { return hook(values); };
}
NativeHook native_of(const PostHook& hook) { return hook; }
NativeHook native_of(const PostAccumulateHook& hook) {
  return [hook](const variable_list& values, const variable_list&) {
    hook(values[0]);
    return values;
  };
}

}  // namespace

CppAutogradHook::CppAutogradHook(const AutogradHookSpec& spec, std::vector<OptionValue> values,
                                 std::string name)
    : spec_(spec),
      values_(std::move(values)),
      name_(std::move(name)),
      function_(named_errors("hook '" + name_ + "'", [&] { return spec.make(values_); })) {
  const bool callable =
      std::visit([](const auto& hook) { return static_cast<bool>(hook); }, function_);
  TORCH_CHECK_TYPE(callable, "hook '", name_, "' was made without a function to call");
}

NativeHook CppAutogradHook::native() const {
  const auto native = std::visit([](const auto& hook) { return native_of(hook); }, function_);
  const auto where = "hook '" + name_ + "'";
  return [native, where](const variable_list& values, const variable_list& others) {
    return named_errors(where, [&] { return native(values, others); });
  };
}

}  // namespace commhook
