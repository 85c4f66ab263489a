#include "runtime/cpp_hooks/hook_libraries.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>

namespace commhook {
namespace {

// "2.13" for "2.13.0+cpu": the C++ interfaces are stable within one minor release.
std::string release(const std::string& version) {
  const auto first = version.find('.');
  return version.substr(0, version.find('.', first + 1));
}

template <typename Spec>
struct Known {
  const Spec* spec;
  std::string path;  // empty for this library's own hooks
};

template <typename Spec>
std::string names_of(const std::map<std::string, Known<Spec>>& known) {
  std::string names;
  for (const auto& entry : known) {
    names += (names.empty() ? "'" : ", '") + entry.first + "'";
  }
  return names.empty() ? "none" : names;
}

template <typename... Text>
void check_loads(bool good, const std::string& path, const Text&... text) {
  if (!good) {
    throw pybind11::import_error(c10::str("load_cpp_hooks: '", path, "' ", text...));
  }
}

class HookLibraries {
 public:
  static HookLibraries& instance() {
    // Never freed: hooks may run until the process ends.
    static auto* const libraries = new HookLibraries();
    return *libraries;
  }

  std::vector<std::string> take(const std::string& path) {
    const HookRegistry& registry = registry_of(path);
    const std::lock_guard lock(mutex_);
    auto comm_hooks = with(comm_hooks_, registry.comm_hooks, path);
    auto autograd_hooks = with(autograd_hooks_, registry.autograd_hooks, path);
    std::vector<std::string> names;
    for (const auto& spec : registry.comm_hooks) {
      names.push_back(spec.name);
    }
    for (const auto& spec : registry.autograd_hooks) {
      names.push_back(spec.name);
    }
    TORCH_CHECK_VALUE(!names.empty(), "load_cpp_hooks: '", path,
                      "' registers no hooks; put COMMHOOK_REGISTER_HOOK(Class, \"name\") into it");
    comm_hooks_.swap(comm_hooks);
    autograd_hooks_.swap(autograd_hooks);
    return names;
  }

  const CommHookSpec& comm_hook(const std::string& name) const {
    return find(comm_hooks_, name, "communication");
  }
  const AutogradHookSpec& autograd_hook(const std::string& name) const {
    return find(autograd_hooks_, name, "autograd");
  }

 private:
  HookLibraries() {
    comm_hooks_ = with(comm_hooks_, hookRegistry().comm_hooks, "");
    autograd_hooks_ = with(autograd_hooks_, hookRegistry().autograd_hooks, "");
  }

  static const HookRegistry& registry_of(const std::string& path) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    check_loads(library != nullptr, path, "has not been opened");
    const auto get =
        reinterpret_cast<const HookLibrary* (*)()>(dlsym(library, "commhook_hook_library"));
    TORCH_CHECK_VALUE(
        get != nullptr, "load_cpp_hooks: '", path,
        "' is not a library of hooks: its sources must include commhook/comm_hook.h or "
        "commhook/autograd_hook.h");
    const HookLibrary& found = *get();
    check_loads(found.headers_version == COMMHOOK_HEADERS_VERSION, path,
                "was built with headers of version ", found.headers_version,
                ", and this torch_commhook has version ", COMMHOOK_HEADERS_VERSION,
                "; build it again");
    check_loads(release(found.torch_version) == release(COMMHOOK_TORCH_VERSION), path,
                "was built for torch ", found.torch_version, ", and torch_commhook for ",
                COMMHOOK_TORCH_VERSION, "; build it again");
    return *found.registry;
  }

  template <typename Spec>
  static std::map<std::string, Known<Spec>> with(std::map<std::string, Known<Spec>> known,
                                                 const std::vector<Spec>& specs,
                                                 const std::string& path) {
    for (const auto& spec : specs) {
      check(spec, path);
      const auto [place, is_new] = known.emplace(spec.name, Known<Spec>{&spec, path});
      const auto& other = place->second;
      TORCH_CHECK_VALUE(is_new || other.spec == &spec, "load_cpp_hooks: '", path,
                        "' registers a hook '", spec.name, "', which ",
                        other.path.empty()   ? "torch_commhook itself"
                        : other.path == path ? "it registers twice"
                                             : "'" + other.path + "'",
                        other.path == path ? "" : " has registered already");
    }
    return known;
  }

  template <typename Spec>
  static void check(const Spec& spec, const std::string& path) {
    TORCH_CHECK_VALUE(!spec.name.empty(), "load_cpp_hooks: '", path,
                      "' registers a hook with no name");
    std::map<std::string, int> seen;
    for (const auto& option : spec.options) {
      TORCH_CHECK_VALUE(
          !option.name.empty() && option.name != "process_group" && seen[option.name]++ == 0,
          "load_cpp_hooks: '", path, "' registers a hook '", spec.name,
          "' whose options must have distinct names, not empty and not "
          "process_group; got '",
          option.name, "'");
      for (const auto& rule : option.rules) {
        TORCH_CHECK_VALUE(!option.default_value || rule.holds(*option.default_value),
                          "load_cpp_hooks: '", path, "' registers a hook '", spec.name,
                          "' whose option '", option.name, "' must be ", rule.contract,
                          ", but its default is not");
      }
    }
  }

  template <typename Spec>
  const Spec& find(const std::map<std::string, Known<Spec>>& known, const std::string& name,
                   const char* kind) const {
    const std::lock_guard lock(mutex_);
    const auto found = known.find(name);
    TORCH_CHECK_VALUE(found != known.end(), "cpp: there is no ", kind, " hook '", name,
                      "' in C++, only ", names_of(known),
                      "; load_cpp_hooks(path) loads the hooks of a library");
    return *found->second.spec;
  }

  mutable std::mutex mutex_;
  std::map<std::string, Known<CommHookSpec>> comm_hooks_;
  std::map<std::string, Known<AutogradHookSpec>> autograd_hooks_;
};

}  // namespace

void open_hook_library(const std::string& path) {
  // Never closed: hooks may run until the process ends.
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    const char* const failure = dlerror();
    check_loads(false, path, "does not load: ", failure == nullptr ? "" : failure,
                ". It must be built for the torch that is installed, ", COMMHOOK_TORCH_VERSION);
  }
}

std::vector<std::string> take_hook_library(const std::string& path) {
  return HookLibraries::instance().take(path);
}

const CommHookSpec& find_comm_hook(const std::string& name) {
  return HookLibraries::instance().comm_hook(name);
}

const AutogradHookSpec& find_autograd_hook(const std::string& name) {
  return HookLibraries::instance().autograd_hook(name);
}

}  // namespace commhook
