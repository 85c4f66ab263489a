// The registry of a library's hooks, by name, and the macros that fill it.
#pragma once

#include <torch/version.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "commhook/autograd_hook_types.h"
#include "commhook/comm_hook_interface.h"
#include "commhook/options.h"
#include "commhook/version.h"

// Registers a class of communication hooks, at namespace scope:
//
//   COMMHOOK_REGISTER_HOOK(Class, "name", options...);
//
// The class derives from commhook::CommHookInterface, or from c10d::CommHookInterface. Its
// constructor takes the values of the options in their order. If it takes the process group
// (c10::intrusive_ptr<c10d::ProcessGroup>) before these, each group has its own object.
#define COMMHOOK_REGISTER_HOOK(Class, ...) \
  COMMHOOK_REGISTER_(commhook::detail::addCommHook<Class>(__VA_ARGS__), __COUNTER__)

// Registers hooks of the autograd engine:
//
//   COMMHOOK_REGISTER_AUTOGRAD_HOOK(make, "name", options...);
//
// make(values of the options...) returns a commhook::TensorHook, PreHook, PostHook or
// PostAccumulateHook.
#define COMMHOOK_REGISTER_AUTOGRAD_HOOK(...) \
  COMMHOOK_REGISTER_(commhook::detail::addAutogradHook(__VA_ARGS__), __COUNTER__)

#define COMMHOOK_REGISTER_(added, number) COMMHOOK_REGISTER_NUMBERED_(added, number)
#define COMMHOOK_REGISTER_NUMBERED_(added, number) \
  [[maybe_unused]] static const bool commhook_registered_##number = (added)

namespace commhook {

struct CommHookSpec {
  std::string name;
  std::vector<OptionSpec> options;
  bool takes_group;
  // The group is null if takes_group is false.
  std::function<std::shared_ptr<CommHookInterface>(const std::vector<OptionValue>& values,
                                                   const ProcessGroupPtr& group)>
      make;
};

struct AutogradHookSpec {
  std::string name;
  std::vector<OptionSpec> options;
  std::function<AutogradHookFunction(const std::vector<OptionValue>& values)> make;
};

struct HookRegistry {
  std::vector<CommHookSpec> comm_hooks;
  std::vector<AutogradHookSpec> autograd_hooks;
};

// load_cpp_hooks() reads this from a library. The first two members have the same layout in all
// versions of the headers.
struct HookLibrary {
  uint32_t headers_version;
  const char* torch_version;
  HookRegistry* registry;
};

// Each library has its own registry.
COMMHOOK_LOCAL inline HookRegistry& hookRegistry() {
  static HookRegistry registry;
  return registry;
}

namespace detail {

template <typename... T, size_t... kIndex, typename Use>
auto withValues(const std::vector<OptionValue>& values, std::index_sequence<kIndex...>,
                const Use& use) {
  return use(std::get<T>(values.at(kIndex))...);
}

template <typename Hook>
std::shared_ptr<CommHookInterface> asCommHook(std::unique_ptr<Hook> hook) {
  if constexpr (std::is_base_of_v<CommHookInterface, Hook>) {
    return hook;
  } else {
    return std::make_shared<TorchCommHook>(std::move(hook));
  }
}

template <typename Hook, typename... T>
bool addCommHook(const char* name, const Option<T>&... options) {
  static_assert(std::is_base_of_v<CommHookInterface, Hook> ||
                    std::is_base_of_v<c10d::CommHookInterface, Hook>,
                "a communication hook derives from commhook::CommHookInterface or "
                "c10d::CommHookInterface");
  constexpr bool takes_group = std::is_constructible_v<Hook, const ProcessGroupPtr&, T...>;
  static_assert(takes_group || std::is_constructible_v<Hook, T...>,
                "a hook's constructor takes the values of its options in their order, or a process "
                "group and then these");
  const auto make = [](const std::vector<OptionValue>& values,
                       [[maybe_unused]] const ProcessGroupPtr& group) {
    return withValues<T...>(values, std::index_sequence_for<T...>(), [&](const T&... value) {
      if constexpr (takes_group) {
        return asCommHook(std::make_unique<Hook>(group, value...));
      } else {
        return asCommHook(std::make_unique<Hook>(value...));
      }
    });
  };
  hookRegistry().comm_hooks.push_back({name, {options.spec()...}, takes_group, make});
  return true;
}

template <typename Make, typename... T>
bool addAutogradHook(Make make, const char* name, const Option<T>&... options) {
  static_assert(std::is_invocable_v<Make, T...>,
                "the factory of an autograd hook takes the values of its options in their order");
  hookRegistry().autograd_hooks.push_back(
      {name, {options.spec()...}, [make](const std::vector<OptionValue>& values) {
         return withValues<T...>(values, std::index_sequence_for<T...>(), [&](const T&... value) {
           return AutogradHookFunction(make(value...));
         });
       }});
  return true;
}

}  // namespace detail
}  // namespace commhook

// Every library that includes this header exports the function, even without hooks.
extern "C" COMMHOOK_EXPORT __attribute__((weak, used)) const commhook::HookLibrary*
commhook_hook_library() {
  static const commhook::HookLibrary library{COMMHOOK_HEADERS_VERSION, TORCH_VERSION,
                                             &commhook::hookRegistry()};
  return &library;
}
