#include "runtime/autograd/autograd_hook.h"

#include <algorithm>
#include <utility>

#include "runtime/python/hook_names.h"

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

int64_t HookList::add(const py::object& hook) {
  auto added = hook.cast<std::shared_ptr<AutogradHook>>();
  if (dict_ != nullptr && PyODict_SetItem(dict_, hook.ptr(), hook.ptr()) != 0) {
    throw py::error_already_set();
  }
  const std::lock_guard lock(mutex_);
  auto hooks = hooks_ ? *hooks_ : std::vector<std::shared_ptr<const AutogradHook>>();
  hooks.push_back(std::move(added));
  hooks_ = std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(hooks);
  entries_.push_back({next_id_, hook.ptr()});
  return next_id_++;
}

void HookList::remove(int64_t id) {
  Snapshot dropped;  // dropped without the lock: may hold the last reference to a Python object
  py::object dict;
  py::object key;
  {
    const std::lock_guard lock(mutex_);
    const auto place = std::find_if(entries_.begin(), entries_.end(),
                                    [id](const Entry& entry) { return entry.id == id; });
    if (place == entries_.end()) {
      return;
    }
    if (dict_ != nullptr) {
      dict = py::reinterpret_borrow<py::object>(dict_);
      key = py::reinterpret_borrow<py::object>(place->key);
    }
    auto hooks = *hooks_;
    hooks.erase(hooks.begin() + (place - entries_.begin()));
    entries_.erase(place);
    dropped = std::exchange(
        hooks_,
        hooks.empty()
            ? nullptr
            : std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(hooks));
  }
  if (dict && PyODict_DelItem(dict.ptr(), key.ptr()) != 0) {
    PyErr_Clear();  // the garbage collector has cleared the dict
  }
}

bool HookList::contains(int64_t id) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(),
                     [id](const Entry& entry) { return entry.id == id; });
}

HookList::Snapshot HookList::snapshot() const {
  const std::lock_guard lock(mutex_);
  return hooks_;
}

HookList::Snapshot all_hooks(PyObject* dict) {
  py::gil_scoped_acquire gil;
  std::vector<std::shared_ptr<const AutogradHook>> hooks;
  const auto values = py::reinterpret_steal<py::list>(PyDict_Values(dict));
  for (const auto& value : values) {
    const auto hook = py::reinterpret_borrow<py::object>(value);
    hooks.push_back(py::isinstance<AutogradHook>(hook)
                        ? hook.cast<std::shared_ptr<AutogradHook>>()
                        : std::make_shared<AutogradHook>(hook, NativeHook(), hook));
  }
  if (hooks.empty()) {
    return nullptr;
  }
  return std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(std::move(hooks));
}

}  // namespace commhook
