// The instruction set that the CPU kernels use.
#pragma once

#include <c10/core/Device.h>

// Whether kernels are also compiled for AVX2 and AVX-512.
#if defined(__x86_64__) && defined(__GNUC__)
#define COMMHOOK_X86_KERNELS
#endif

namespace commhook::cpu {

enum class Capability { kReference, kDefault, kAvx2, kAvx512 };

// The best instruction set of this processor, or less if COMMHOOK_CPU_CAPABILITY or the operator
// cpu_capability limits it.
Capability capability();

// Whether CPU kernels serve a device; otherwise the reference kernels do.
inline bool serve(c10::Device device) {
  return device.is_cpu() && capability() != Capability::kReference;
}

}  // namespace commhook::cpu
