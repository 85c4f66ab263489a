// Which instruction set the CPU kernels use.
#pragma once

namespace commhook::cpu {

enum class Capability { kReference, kDefault, kAvx2, kAvx512 };

// The best that this processor has, or less where COMMHOOK_CPU_CAPABILITY or the operator
// cpu_capability limits it.
Capability capability();

}  // namespace commhook::cpu
