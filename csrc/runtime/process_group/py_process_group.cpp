#include "runtime/process_group/py_process_group.h"

#include <utility>

#include "runtime/process_group/py_group_call.h"
#include "runtime/process_group/py_group_methods.h"
#include "runtime/python/hook_names.h"

namespace commhook {

using namespace group_methods;

// For example "Group.allreduce".
std::string name_in(const PyProcessGroup& group, const PyMethod& method) {
  py::gil_scoped_acquire gil;
  const auto self = python_object_of(group);
  return (self ? type_name(self) : "ProcessGroup") + "." + method.names().front();
}

const std::string& PyProcessGroup::kept(std::string text) const {
  const std::lock_guard lock(mutex_);
  return *texts_.insert(std::move(text)).first;
}

// c10d keeps the name in the backends, but a group may have none.
const std::string& PyProcessGroup::text(const PyMethod& method,
                                        const std::atomic<const std::string*>& own) const {
  return kept(call<std::string>(method, [&]() -> std::string {
    const std::string* const known = own;
    TORCH_CHECK(known != nullptr || &own == &description_, name_in(*this, method),
                ": the group has no name yet; torch_commhook.process_group.register gives it one");
    return known == nullptr ? "" : *known;
  }));
}

// ---- the group ---------------------------------------------------------------------------------

int PyProcessGroup::getRank() const {
  return call<int>(kRank, [&] { return ProcessGroup::getRank(); });
}

int PyProcessGroup::getSize() const {
  return call<int>(kSize, [&] { return ProcessGroup::getSize(); });
}

const std::string PyProcessGroup::getBackendName() const {
  // c10d searches a group for backends by the names of its own backends.
  return call<std::string>(kBackendName, [&] {
    return deviceTypeToBackendType_.empty() ? "custom"
                                            : std::string(ProcessGroup::getBackendName());
  });
}

const std::string& PyProcessGroup::getGroupName() const { return text(kGroupName, name_); }

void PyProcessGroup::setGroupName(const std::string& name) {
  call<void>(
      kSetGroupName,
      [&] {
        name_ = &kept(name);
        ProcessGroup::setGroupName(name);
      },
      name);
}

const std::string& PyProcessGroup::getGroupDesc() const { return text(kGroupDesc, description_); }

void PyProcessGroup::setGroupDesc(const std::string& description) {
  call<void>(
      kSetGroupDesc,
      [&] {
        description_ = &kept(description);
        ProcessGroup::setGroupDesc(description);
      },
      description);
}

void PyProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  call<void>(kSetTimeout, [&] { ProcessGroup::setTimeout(timeout); }, timeout);
}

void PyProcessGroup::shutdown() {
  call<void>(kShutdown, [&] { ProcessGroup::shutdown(); });
}

void PyProcessGroup::abort() {
  with_hooks<void>(kAbort, [&] { ProcessGroup::abort(); });
}

uint64_t PyProcessGroup::getSequenceNumberForGroup() {
  return collective<uint64_t>(kSequenceNumber,
                              [&] { return ProcessGroup::getSequenceNumberForGroup(); });
}

void PyProcessGroup::startCoalescing(c10::DeviceType device) {
  collective<void>(
      kStartCoalescing, [&] { ProcessGroup::startCoalescing(device); }, c10::Device(device));
}

PyProcessGroup::Work PyProcessGroup::endCoalescing(c10::DeviceType device) {
  return collective<Work>(
      kEndCoalescing, [&] { return ProcessGroup::endCoalescing(device); }, c10::Device(device));
}

c10::intrusive_ptr<c10d::ProcessGroup> PyProcessGroup::mergeRemoteGroup(
    const c10::intrusive_ptr<c10d::Store>& store, const MergeOptions& options, const int& size) {
  return collective<c10::intrusive_ptr<ProcessGroup>>(
      kMergeRemoteGroup, [&] { return ProcessGroup::mergeRemoteGroup(store, options, size); },
      store, size, options.timeout, options.group_name, options.group_desc);
}

c10::intrusive_ptr<c10d::ProcessGroup> PyProcessGroup::splitGroup(
    const std::vector<int>& ranks, const std::optional<std::chrono::milliseconds>& timeout,
    const std::optional<c10::intrusive_ptr<c10d::Backend::Options>>& options,
    const std::optional<std::string>& name, const std::optional<std::string>& description
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
    ,
    const std::optional<std::vector<c10::Device>>& devices
#endif
) {
#if !COMMHOOK_TORCH_AT_LEAST(2, 13)
  const std::optional<std::vector<c10::Device>> devices;
#endif
  return collective<c10::intrusive_ptr<ProcessGroup>>(
      kSplitGroup,
      [&] {
        return ProcessGroup::splitGroup(ranks, timeout, options, name, description
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
                                        ,
                                        devices
#endif
        );
      },
      ranks, timeout, options, name, description, devices);
}

#if COMMHOOK_TORCH_AT_LEAST(2, 14)

void PyProcessGroup::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  call<void>(kAddEphemeralTimeout, [&] { ProcessGroup::addEphemeralTimeout(timeout); }, timeout);
}

bool PyProcessGroup::supportsReconfigure() const {
  return call<bool>(kSupportsReconfigure, [&] {
    return !deviceTypeToBackendType_.empty() && ProcessGroup::supportsReconfigure();
  });
}

c10d::ReconfigureHandle PyProcessGroup::get_reconfigure_handle() const {
  return collective<c10d::ReconfigureHandle>(
      kGetReconfigureHandle, [&] { return ProcessGroup::get_reconfigure_handle(); });
}

PyProcessGroup::Work PyProcessGroup::reconfigure(const c10d::ReconfigureOptions& options) {
  return collective<Work>(
      kReconfigure, [&] { return ProcessGroup::reconfigure(options); }, options);
}

bool PyProcessGroup::supportsWindow() const {
  return call<bool>(kSupportsWindow, [&] {
    return !deviceTypeToBackendType_.empty() && ProcessGroup::supportsWindow();
  });
}

c10::intrusive_ptr<c10d::Window> PyProcessGroup::new_window(
    const std::optional<at::Tensor>& tensor) {
  return collective<c10::intrusive_ptr<c10d::Window>>(
      kNewWindow, [&] { return ProcessGroup::new_window(tensor); }, tensor);
}

// ---- hooks, kept in Python ---------------------------------------------------------------------

void PyProcessGroup::registerPreHook(int64_t hook_id, c10d::PreHook hook) {
  register_hook(kRegisterPreHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterPreHook(int64_t hook_id) {
  call<void>(kUnregisterPreHook, [] {}, hook_id);
}

void PyProcessGroup::registerPostHook(int64_t hook_id, c10d::PostHook hook) {
  register_hook(kRegisterPostHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterPostHook(int64_t hook_id) {
  call<void>(kUnregisterPostHook, [] {}, hook_id);
}

void PyProcessGroup::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  register_hook(kRegisterAbortHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterAbortHook(int64_t hook_id) {
  call<void>(kUnregisterAbortHook, [] {}, hook_id);
}

#if COMMHOOK_TORCH_AT_LEAST(2, 15)

bool PyProcessGroup::supportsAbortHooks() const {
  return call<bool>(kSupportsAbortHooks, [] { return false; });
}

bool PyProcessGroup::supportsCompletionHooks() const {
  return call<bool>(kSupportsCompletionHooks, [] { return false; });
}

void PyProcessGroup::registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) {
  register_hook(kRegisterCompletionHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterCompletionHook(int64_t hook_id) {
  call<void>(kUnregisterCompletionHook, [] {}, hook_id);
}

#endif

#else

void PyProcessGroup::setSequenceNumberForGroup() {
  collective<void>(kSetSequenceNumber, [&] { ProcessGroup::setSequenceNumberForGroup(); });
}

#endif

}  // namespace commhook
