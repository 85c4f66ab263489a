#include "ops/cpu/capability.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <string>

namespace commhook::cpu {
namespace {

constexpr const char* kNames[] = {"reference", "default", "avx2", "avx512"};

Capability parse(const std::string& name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) {
      return static_cast<Capability>(i);
    }
  }
  TORCH_CHECK_VALUE(
      false, "cpu_capability: limit must be reference, default, avx2 or avx512, got '", name, "'");
}

Capability of_this_processor() {
#ifdef COMMHOOK_X86_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      return Capability::kAvx512;
    }
    return Capability::kAvx2;
  }
#endif
  return Capability::kDefault;
}

Capability limited(Capability limit) { return std::min(limit, of_this_processor()); }

std::atomic<Capability>& current() {
  static std::atomic<Capability> value{[] {
    const char* limit = std::getenv("COMMHOOK_CPU_CAPABILITY");
    return limited(limit == nullptr ? Capability::kAvx512 : parse(limit));
  }()};
  return value;
}

std::string cpu_capability(std::optional<std::string> limit) {
  if (limit.has_value()) {
    current().store(limited(parse(*limit)));
  }
  return kNames[static_cast<int>(capability())];
}

TORCH_LIBRARY_IMPL(commhook, CompositeImplicitAutograd, m) {
  m.impl("cpu_capability", cpu_capability);
}

}  // namespace

Capability capability() { return current().load(std::memory_order_relaxed); }

}  // namespace commhook::cpu
