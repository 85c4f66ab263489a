// The bits of a float32, for host and device.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace commhook {

COMMHOOK_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

COMMHOOK_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr uint32_t kAbsolute = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNaN = 0x7fc00000u;
constexpr float kLargestFinite = 0x1.fffffep127f;

}  // namespace commhook
