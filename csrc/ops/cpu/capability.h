// Which instruction set the CPU kernels use.
#pragma once

#include <c10/core/Device.h>

// Whether kernels are compiled for AVX2 and AVX-512, too.
#if defined(__x86_64__) && defined(__GNUC__)
#define COMMHOOK_X86_KERNELS
#endif

namespace commhook::cpu {

enum class Capability { kReference, kDefault, kAvx2, kAvx512 };

// The best that this processor has, or less where COMMHOOK_CPU_CAPABILITY or the operator
// cpu_capability limits it.
Capability capability();

// Whether CPU kernels serve a device: else the reference kernels do.
inline bool serve(c10::Device device) {
  return device.is_cpu() && capability() != Capability::kReference;
}

}  // namespace commhook::cpu
