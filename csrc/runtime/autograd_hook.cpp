#include "runtime/autograd_hook.h"

#include <algorithm>
#include <utility>

#include "runtime/hook_names.h"

namespace py = pybind11;

namespace commhook {

const char* name_of(HookKind kind) {
  switch (kind) {
    case HookKind::kTensor:
      return "tensor";
    case HookKind::kPre:
      return "prehook";
    case HookKind::kPost:
      return "posthook";
    default:
      return "post_accumulate";
  }
}

HookKind hook_kind(const std::string& name) {
  for (const auto kind :
       {HookKind::kTensor, HookKind::kPre, HookKind::kPost, HookKind::kPostAccumulate}) {
    if (name == name_of(kind)) {
      return kind;
    }
  }
  TORCH_CHECK_VALUE(
      false, "kind must be 'tensor', 'prehook', 'posthook' or 'post_accumulate', got '", name, "'");
}

std::string AutogradHook::name() const {
  py::gil_scoped_acquire gil;
  return hook_name(callable_.get());
}

int64_t HookList::add(std::shared_ptr<const AutogradHook> hook) {
  const std::lock_guard lock(mutex_);
  auto hooks = hooks_ ? *hooks_ : std::vector<std::shared_ptr<const AutogradHook>>();
  hooks.push_back(std::move(hook));
  hooks_ = std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(hooks);
  ids_.push_back(next_id_);
  return next_id_++;
}

void HookList::remove(int64_t id) {
  Snapshot dropped;  // without the lock: it may be the last reference to a Python object
  const std::lock_guard lock(mutex_);
  const auto place = std::find(ids_.begin(), ids_.end(), id);
  if (place == ids_.end()) {
    return;
  }
  auto hooks = *hooks_;
  hooks.erase(hooks.begin() + (place - ids_.begin()));
  ids_.erase(place);
  dropped = std::exchange(
      hooks_,
      hooks.empty()
          ? nullptr
          : std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(hooks));
}

bool HookList::contains(int64_t id) const {
  const std::lock_guard lock(mutex_);
  return std::find(ids_.begin(), ids_.end(), id) != ids_.end();
}

HookList::Snapshot HookList::snapshot() const {
  const std::lock_guard lock(mutex_);
  return hooks_;
}

}  // namespace commhook
